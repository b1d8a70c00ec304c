"""Pickles that run a command where a real unpickler reads them, one for each way in; and what only costs the reader."""

from __future__ import annotations

import os
import pickle
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.trainer.pickles import Call, Global, Raw, Thing, record, spell


class _Reduced:
    def __init__(self, command: str) -> None:
        self._command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self._command,)


def exploits(mark: Path) -> Mapping[str, bytes]:
    """Each makes the file `mark` when it is unpickled, or would with the right module at hand."""
    command = f"touch {mark}"
    word = b"X" + struct.pack("<I", len(command)) + command.encode()
    line = command.encode()
    system = Global(module="posix", name="system")
    evaluate = Global(module="builtins", name="eval")
    code = f"__import__('os').system({command!r})"
    loaded = Call(of=evaluate, arguments=(code,))
    return {
        **{f"protocol {n}": pickle.dumps(_Reduced(command), protocol=n) for n in range(6)},
        "GLOBAL and REDUCE": b"\x80\x02cposix\nsystem\n(" + word + b"tR.",
        "INST": b"(S'" + line + b"'\niposix\nsystem\n.",
        "OBJ": b"(cposix\nsystem\n" + word + b"o.",
        "STACK_GLOBAL": spell(Call(of=system, arguments=(command,))),
        "STACK_GLOBAL, dotted": spell(Call(of=Global(module="os", name="path.os.system"), arguments=(command,))),
        "NEWOBJ": spell(Raw(b"\x8c\x05posix\x8c\x06system\x93(" + word + b"t\x81")),
        "NEWOBJ_EX": spell(Raw(b"\x8c\x05posix\x8c\x06system\x93(" + word + b"t}\x92")),
        "eval": spell(loaded),
        "BUILD with __setstate__": spell(
            Thing(of=Global(module="torch.distributed.checkpoint.metadata", name="Metadata"), state=loaded)
        ),
        "BUILD of a class": spell(
            Raw(b"\x8c\x05torch\x8c\x04Size\x93}\x8c\x0c__setstate__\x8c\x05posix\x8c\x06system\x93sb" + word + b"b")
        ),
        "inside of real metadata": spell(record("Metadata", state_dict_metadata={"w": loaded}, storage_data={})),
        "as a key": spell(record("Metadata", state_dict_metadata=Raw(b"}(" + _code_of(loaded) + b"Nu"))),
        "getattr": spell(
            Call(
                of=Call(of=Global(module="builtins", name="getattr"), arguments=(system, "__call__")), arguments=("x",)
            )
        ),
        "persistent id": b"\x80\x04" + word + b"Q.",
        "persistent id, text": b"P" + line + b"\n.",
        "EXT1": b"\x80\x02\x82\x01" + word + b"\x85R.",
        "EXT4": b"\x80\x02\x84\x01\x00\x00\x00" + word + b"\x85R.",
        "a second pickle": pickle.dumps(None) + pickle.dumps(_Reduced(command)),
        "protocol 0 under another name": b"\x80\x00cposix\nsystem\n(S'" + line + b"'\ntR.",
        "protocol 9": b"\x80\x09" + pickle.dumps(_Reduced(command))[2:],
        "a buffer from outside": b"\x80\x05\x97.",
        "our own reader": spell(Call(of=Global(module="trainer.format.pickled", name="Record"), arguments=(command,))),
        "copyreg": spell(
            Call(
                of=Global(module="copyreg", name="_reconstructor"), arguments=(Global(module="os", name="_wrap_close"),)
            )
        ),
    }


def _code_of(value: Any) -> bytes:
    return spell(value)[2:-1]


def burdens(count: int) -> Mapping[str, bytes]:
    """Each costs a careless reader memory, stack or time without end; `count`: bytes that each may have itself."""
    return {
        "lists": b"\x80\x04" + b"]" * count,
        "marks": b"\x80\x04" + b"(" * count,
        "nested tuples": b"\x80\x04)" + b"\x85" * count + b".",
        "nested tuples as a key": b"\x80\x04})" + b"\x85" * count + b"Ns.",
        "nested lists": b"\x80\x04" + b"]" * (count // 2) + b"a" * (count // 2 - 1) + b".",
        "memo by a far number": b"\x80\x04Nr\xff\xff\xff\x7f.",
        "many memos": b"\x80\x04N" + b"\x94" * count + b".",
        "a text of four gigabytes": b"\x80\x04X\xff\xff\xff\xff.",
        "a text of 2**63 bytes": b"\x80\x04\x8d" + b"\xff" * 7 + b"\x7f.",
        "bytes of 2**63": b"\x80\x04\x8e" + b"\xff" * 7 + b"\x7f.",
        "a byte array of 2**62": b"\x80\x05\x96" + b"\xff" * 7 + b"\x3f.",
        "a frame of 2**63": b"\x80\x04\x95" + b"\xff" * 7 + b"\x7fN.",
        "a whole number of many digits": b"\x80\x04\x8b" + struct.pack("<i", count) + b"\x7f" * count + b".",
        "a whole number as text": b"I" + b"9" * count + b"\n.",
        "a doubling tuple as a key": b"\x80\x04})" + b"".join(b"q%ch%c\x86" % (n, n) for n in range(60)) + b"Ns.",
        "a list in itself as a key": b"\x80\x04}]q\x00h\x00a\x85Ns.",
        "a doubling path": spell(
            Call(
                of=Global(module="pathlib", name="PosixPath"), arguments=(Raw(b"X\xa0\x0f\x00\x00" + b"x" * 4000),) * 40
            )
        ),
        "a size of many numbers": spell(Raw(b"(" + b"K\x01" * (count // 2) + b"t")),
    }
