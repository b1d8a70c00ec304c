"""The manifest's bytes: how they are sealed with a checksum of their own, and what reading them back checks.

The seal is the last field of the JSON object: xxh3_128 of all bytes with the seal left empty. It is found by its place,
so that a newer writer's further fields are covered, too.
"""

from __future__ import annotations

import json
from dataclasses import fields, replace

import xxhash

from trainer.contract import ContractError, Manifest, parse, render_json

_OPENING, _CLOSING = b'"self_xxh3_128":"', b'"}'
_SEAL_CHARS = 32
_FIELDS = frozenset(field.name for field in fields(Manifest))


def seal_manifest(manifest: Manifest) -> bytes:
    """The bytes to publish as MANIFEST.json: the record with its own checksum in it."""
    open_bytes = render_json(replace(manifest, self_xxh3_128=""))
    return open_bytes[: -len(_CLOSING)] + _digest(open_bytes) + _CLOSING


def parse_manifest(data: bytes, *, needs_seal: bool = False) -> Manifest:
    """The manifest in the bytes of a file of any origin.

    Raises `ContractError` when they are no manifest, when the seal does not match, and when there is none with
    `needs_seal`, or in one that names the libraries that wrote it or has fields that are not known: other writers than
    ours may leave seal and libraries out.
    """
    manifest = parse(Manifest, data)
    if not manifest.self_xxh3_128:
        if needs_seal or manifest.libraries:
            raise ContractError("Manifest: it carries no checksum of its own")
        if unknown := json.loads(data).keys() - _FIELDS:  # two damaged bytes can make two names unknown
            raise ContractError(f"Manifest: it has the field {min(unknown)!r:.60} and no checksum of its own")
        return manifest
    head = data[: -len(_CLOSING) - _SEAL_CHARS]
    if not head.endswith(_OPENING) or data != head + _digest(head + _CLOSING) + _CLOSING:
        raise ContractError("Manifest: it does not match its own checksum")
    return manifest


def _digest(data: bytes) -> bytes:
    return str(xxhash.xxh3_128_hexdigest(data)).encode()
