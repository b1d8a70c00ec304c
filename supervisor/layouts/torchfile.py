"""One file that torch.save wrote, as a piece of a checkpoint."""

from __future__ import annotations

from supervisor.layouts import torchzip
from supervisor.layouts.found import Piece
from supervisor.layouts.tree import Broken, Tree, read_at

# what every file of the old format starts with: torch.serialization.MAGIC_NUMBER and PROTOCOL_VERSION, as pickles
_OLD_FORMAT = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03."


def to_piece(tree: Tree, path: str) -> Piece:
    """The file as one piece; raises Broken when it is cut or no file of torch.save.

    The old format (before torch 1.6, or asked for) is a row of pickles and raw bytes: nothing says where it ends.
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
        if read_at(fd, 0, len(_OLD_FORMAT)) != _OLD_FORMAT:
            raise Broken(f"{path} is not a file of torch.save")
    return Piece(path=path, offset=0, length=size, seal="none")
