from __future__ import annotations

import time
from pathlib import Path

import pytest

from supervisor.child import Child, ChildGone, ChildLate


@pytest.mark.parametrize("module", ["this", "no_such_module_anywhere"])
def test_a_process_that_does_not_speak_the_protocol_is_gone(module: str) -> None:
    child = Child(module)
    with pytest.raises(ChildGone):
        child.call(b"question", deadline_s=10.0)
    assert child.close()


def test_a_process_that_says_nothing_is_late() -> None:
    child = Child("http.server", arguments=("--bind", "127.0.0.1", "0"))
    with pytest.raises(ChildLate):
        child.call(b"question", deadline_s=0.2)
    assert child.close()


def test_children_inherit_nothing_of_the_service_s_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "x")
    monkeypatch.setenv("SBATCH_PARTITION", "x")
    child = Child("http.server", arguments=("--bind", "127.0.0.1", "0"))
    environ = Path(f"/proc/{child.pid}/environ")
    until = time.monotonic() + 30
    while not environ.read_bytes() and time.monotonic() < until:  # empty until the new program has its memory
        time.sleep(0.01)
    names = {entry.partition("=")[0] for entry in environ.read_text().split("\0") if entry}
    child.close()
    assert names == {"PATH", "LANG", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE"}
