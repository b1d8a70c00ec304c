from collections.abc import Iterator
from pathlib import Path

import pytest

from supervisor.store import Store
from tests.store.records import NOW


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.db"


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    with Store.open(path, now=NOW) as opened:
        yield opened
