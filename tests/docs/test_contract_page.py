"""The contract's page is enough to follow the contract without this project's library."""

from dataclasses import fields

from tests.docs.pages import ROOT
from trainer.contract import Manifest, ManifestFile


def test_every_key_of_a_manifest_is_on_the_contracts_page() -> None:
    page = (ROOT / "docs" / "contract.md").read_text()
    table = page.partition("| key of MANIFEST.json |")[2].partition("\n\n")[0]
    keys = {field.name for record in (Manifest, ManifestFile) for field in fields(record)}
    assert keys
    assert {key for key in keys if f"`{key}`" not in table} == set()
