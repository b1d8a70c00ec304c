"""The make targets that the pages name are there, and `make help` names every one."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, ROOT, commands, name


def targets(text: str) -> set[str]:
    return {
        word
        for command in commands(text)
        if command.startswith("make ")
        for word in shlex.split(command, comments=True)[1:]
        if "=" not in word and not word.startswith("-")
    }


def is_known(target: str) -> bool:
    makefile = (ROOT / "Makefile").read_text()
    if target.startswith("bench-"):
        return (ROOT / "bench" / f"{target.removeprefix('bench-').replace('-', '_')}.py").exists()
    return re.search(rf"^{re.escape(target)}:", makefile, re.MULTILINE) is not None


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_target_that_a_page_names_exists(page: Path) -> None:
    assert {target for target in targets(page.read_text()) if not is_known(target)} == set()


def test_make_without_a_target_lists_every_target() -> None:
    shown = subprocess.run(["make", "--no-print-directory"], cwd=ROOT, check=True, capture_output=True, text=True)
    phony = re.search(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert phony
    assert {target for target in phony[1].split() if f"make {target} " not in shown.stdout} == {"help"}
