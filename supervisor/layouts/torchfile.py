"""One file that torch.save wrote, as a piece of a checkpoint."""

from __future__ import annotations

import io
import pickletools

from supervisor.layouts import torchzip
from supervisor.layouts.found import Piece
from supervisor.layouts.scalars import MAX_OPCODES, MAX_PICKLE_BYTES
from supervisor.layouts.tree import Broken, Tree, read_at

# what every file of the old format starts with: torch.serialization.MAGIC_NUMBER and PROTOCOL_VERSION, as pickles
_OLD_FORMAT = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03."
_OLD_PICKLES = 5  # these two, what system wrote it, the object, the names of the storages


def to_piece(tree: Tree, path: str) -> Piece:
    """The file as one piece; raises Broken when it is cut or no file of torch.save.

    The old format (before torch 1.6, or asked for) is a row of pickles, and raw bytes of which nothing says where they
    end.
    """
    return tree.once("torch", path, lambda: _inspect(tree, path))


def _inspect(tree: Tree, path: str) -> Piece:
    size = tree.file(path).size
    with tree.open(path) as fd:
        if torchzip.is_zip(fd):
            try:
                torchzip.list_entries(fd, 0, size)
            except Broken as error:
                raise Broken(f"{path}: {error}") from None
            return Piece(path=path, offset=0, length=size, seal="zip")
        if not _is_old_format(read_at(fd, 0, MAX_PICKLE_BYTES), is_all=size <= MAX_PICKLE_BYTES):
            raise Broken(f"{path} is not a file of torch.save, or it is cut")
    return Piece(path=path, offset=0, length=size, seal="none")


def _is_old_format(data: bytes, *, is_all: bool) -> bool:
    """True when the five pickles of the old format follow each other; what lies beyond the first bytes is believed."""
    if not data.startswith(_OLD_FORMAT):
        return False
    stream, count = io.BytesIO(data), 0
    try:
        for _ in range(_OLD_PICKLES):
            for _opcode in pickletools.genops(stream):  # stops at the end of one pickle, and leaves the stream there
                count += 1
                if count > MAX_OPCODES:
                    return True
    except Exception:  # noqa: BLE001 - garbage may raise anything
        return not is_all
    return True
