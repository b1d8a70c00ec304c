"""Recovery inside a real allocation: a node loses its power, the job goes on on the spare."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm.sandbox import Sandbox
from tests.trainer.attempts import STARTS
from tests.trainer.checkpoints import write_checkpoint
from tests.trainer.test_launch_slurm import Job, eventually
from trainer.contract import InterruptionRecord, parse

pytestmark = pytest.mark.slurm


def test_a_power_cut_is_survived_on_the_spare_from_the_verified_checkpoint(tmp_path: Path) -> None:
    with Sandbox.start(nodes=3, slurmd_timeout_s=4) as sandbox:
        job = Job(sandbox, tmp_path, STARTS, options=("-N3",), nodes=2)
        eventually((tmp_path / "up.0.1").exists)
        write_checkpoint(job.paths, 40, attempt=1)
        sandbox.power_cut("n2")
        eventually(lambda: (tmp_path / "up.1.0").exists() and (tmp_path / "up.1.1").exists())
        said = [(tmp_path / f"up.1.{rank}").read_text().split()[:3] for rank in (0, 1)]
        assert said == [["n1", "2", "40"], ["n3", "2", "40"]]
        record = parse(InterruptionRecord, job.paths.interruption(1, 0).read_bytes())
        assert (record.kind, record.nodes, record.training) == ("node_lost", ("n2",), ("n1", "n3"))
        assert "the port of slurmd on n2 does not answer, that of another node does" in record.evidence
        sandbox.run("scontrol", "update", "nodename=n2", "state=down", "reason=gone")  # as Slurm itself does, later
        eventually(lambda: "NumNodes=2 " in sandbox.run("scontrol", "-o", "show", "job", job.job_id).stdout)
        seq = job.report().seq
        eventually(lambda: job.report().seq > seq + 2)
        assert (job.report().phase, job.report().launch) == ("running", 1)
        (tmp_path / "end.1").write_text("0")
        assert job.exit_code() == "0:0"
        ended = job.end()
        assert (ended.exit_code, ended.launches, job.report().launch) == (0, 2, 1)
