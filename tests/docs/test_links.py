"""Every link of every page leads somewhere."""

import re
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, headings, name, prose

_LINK = re.compile(r"\[[^\]\n]*\]\(([^)\s]+)(?: \"[^\"]*\")?\)")


def anchors(page: Path) -> set[str]:
    """The names that headings get on the common hosts: lower case, punctuation out, spaces to dashes."""
    seen: dict[str, int] = {}
    found = set()
    for heading in headings(page.read_text()):
        anchor = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        found.add(f"{anchor}-{seen[anchor]}" if anchor in seen else anchor)
        seen[anchor] = seen.get(anchor, 0) + 1
    return found


def broken_links(page: Path) -> list[str]:
    broken = []
    for link in _LINK.findall(prose(page.read_text())):
        if re.match(r"[a-z]+:", link):  # another site's pages are not ours to test
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_link_resolves(page: Path) -> None:
    assert broken_links(page) == []


def test_a_broken_link_would_be_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Here\n[a](#here) [b](#there) [c](gone.md) `[d](code.md)` [e](https://example.org/gone)\n")
    assert broken_links(page) == ["#there", "gone.md"]
