"""The project's pages, as the tests about them read them."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("changes/*.md")])

_FENCE = re.compile(r"^(```|~~~)[^\n]*\n(.*?)^\1[^\n]*$", re.MULTILINE | re.DOTALL)
_INLINE_CODE = re.compile(r"`([^`\n]+)`")


def name(page: Path) -> str:
    """The page as one would type its path from the top of the checkout."""
    return str(page.relative_to(ROOT))


def prose(text: str) -> str:
    """The page without its code."""
    return _INLINE_CODE.sub("code", _FENCE.sub("", text))


def headings(text: str) -> list[str]:
    """The headings, in order, as they are written."""
    return re.findall(r"^#{1,6} +(.+?) *#*$", _FENCE.sub("", text), re.MULTILINE)


def commands(text: str) -> list[str]:
    """Every piece of code that is a command line: lines of code blocks, and inline code."""
    blocks = [line for _, body in _FENCE.findall(text) for line in body.splitlines()]
    inline = _INLINE_CODE.findall(_FENCE.sub("", text))
    return [line.strip().removeprefix("$ ").removeprefix("# ") for line in [*blocks, *inline]]
