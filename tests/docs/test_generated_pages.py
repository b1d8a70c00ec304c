"""The pages that are made from the code say what the code says today."""

import pytest

from scripts.write_docs import DOCS, pages


@pytest.mark.parametrize("name", ["configuration.md", "cli.md", "modules.md"])
def test_a_generated_page_is_up_to_date(name: str) -> None:
    assert (DOCS / name).read_text() == pages()[name], "run: make docs"


def test_every_configuration_key_says_what_it_means() -> None:
    rows = [line for line in pages()["configuration.md"].splitlines() if line.startswith("| `")]
    assert [row for row in rows if row.endswith("|  |")] == []


def test_every_module_says_what_it_is_for() -> None:
    rows = [line for line in pages()["modules.md"].splitlines() if line.startswith("| [")]
    assert len(rows) > 100
    assert [row for row in rows if row.endswith("|  |")] == []


def test_no_line_of_the_help_is_wider_than_the_page() -> None:
    assert [line for line in pages()["cli.md"].splitlines() if len(line) > 100] == []
