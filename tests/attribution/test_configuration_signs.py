"""What no restart cures: a module or a program that is not there."""

from __future__ import annotations

import pytest

from supervisor.attribution.attribute import attribute
from supervisor.model import RunView
from trainer.contract import ExitRecord

MISSING = (
    "/opt/venv/bin/python3: Error while finding module specification for 'trainer.exmaple.train' "
    "(ModuleNotFoundError: No module named 'trainer.exmaple')"
)
NOT_EXECUTABLE = "/runs/gpt/attempts/1/batch.sh: line 9: exec: /opt/venv/bin/python: cannot execute: Permission denied"


@pytest.mark.parametrize("line", [MISSING, NOT_EXECUTABLE])
def test_a_program_that_is_not_there_is_configuration_and_says_itself(line: str) -> None:
    record = ExitRecord(
        attempt=1, job_id=1, exit_code=1, reason="n1: rank 0 ended with exit code 1", node="n1", time=0.0
    )
    cause = attribute(RunView(attempt=1, exit=record, log_tail=f"[rank0]: {line}\n"), None)
    assert (cause.kind, cause.is_curable) == ("configuration", False)
    assert "exmaple" in cause.sentence or "cannot execute" in cause.sentence
