"""The pages that are made from the code say what the code says today."""

import pytest

from scripts.write_docs import DOCS, pages


@pytest.mark.parametrize("name", ["configuration.md", "cli.md"])
def test_a_generated_page_is_up_to_date(name: str) -> None:
    assert (DOCS / name).read_text() == pages()[name], "run: make docs"


def test_every_configuration_key_has_a_meaning_or_a_telling_name() -> None:
    assert "| `path` | path |" in pages()["configuration.md"]
