"""`[slurm] form` reaches the commands that the daemon runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
from structlog.testing import capture_logs

from supervisor.config import Settings, SlurmSettings
from supervisor.daemon import _client

SQUEUE = """#!/bin/sh
case "$*" in
*--json*) printf '%s' '{"jobs":[{"job_id":7,"job_state":["RUNNING"],"name":"by json"}]}' ;;
*) : ;;
esac
"""


@pytest.fixture(autouse=True)
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "squeue").write_text(SQUEUE)
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho \"scontrol: unrecognized option '--json'\" >&2; exit 1\n")
    (tmp_path / "sinfo").write_text("#!/bin/sh\necho a notice, and no JSON\n")
    for tool in tmp_path.iterdir():
        tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")


def names(form: Literal["text", "json"]) -> list[str]:
    settings = replace(Settings(), slurm=SlurmSettings(client="cli", form=form))
    return [job.name for job in _client(settings).fetch_jobs().jobs]


@pytest.mark.parametrize(("form", "found"), [("text", []), ("json", ["by json"])])
def test_the_daemon_asks_in_the_form_that_is_set(form: Literal["text", "json"], found: list[str]) -> None:
    assert names(form) == found


def test_what_the_client_has_to_say_is_in_the_daemons_log(tmp_path: Path) -> None:
    (tmp_path / "scontrol").write_text(
        '#!/bin/sh\ncase "$*" in *--json*) echo "unrecognized option --json" >&2; exit 1 ;; esac\n'
        "echo NodeName=n1 State=IDLE\n"
    )
    with capture_logs() as lines:
        client = _client(replace(Settings(), slurm=SlurmSettings(client="cli", form="json")))
        assert [node.name for node in client.fetch_nodes().nodes] == ["n1"]
    said = [line["reason"] for line in lines if line["event"] == "slurm.noticed"]
    assert len(said) == 1
    assert "as text from now on" in said[0]
