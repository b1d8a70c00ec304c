"""Which sign counts when several contradict each other, and what is no node's fault."""

from __future__ import annotations

from slurm.types import JobState
from supervisor.attribution.attribute import attribute
from supervisor.core.ends import judge_end
from supervisor.model import RunView
from tests.core.builders import attempt, job, sight
from trainer.contract import ExitRecord, NodeReport

CAUSE = "2026-11-30 12:00:35 kernel: NVRM: Xid (PCI:0000:4e:00): 79, pid=4122, GPU has fallen off the bus.\n"
VICTIM = (
    "[rank{rank}]:[E1130 {time} ProcessGroupNCCL.cpp:683] [PG ID 0 PG GUID 0(default_pg) Rank {rank}] Watchdog caught "
    "collective operation timeout: WorkNCCL(SeqNum=1580, OpType=ALLREDUCE, NumelIn=80, NumelOut=80, "
    "Timeout(ms)=600000) ran for 600096 milliseconds before timing out.\n"
)


def test_what_a_line_says_goes_before_when_its_host_thinks_it_was() -> None:
    """Case AC-11: gpu01's clock is 40 s fast, gpu03's 60 s slow: its victim's line reads earlier than the cause."""
    logs = {
        "gpu01": VICTIM.format(rank=0, time="12:01:16"),
        "gpu02": CAUSE,
        "gpu03": VICTIM.format(rank=2, time="11:59:36"),
    }
    for order in (("gpu01", "gpu02", "gpu03"), ("gpu03", "gpu01", "gpu02")):
        reports = tuple(
            NodeReport(attempt=1, node=n, host=n, time=float(i), exit_code=1, log_tail=logs[n])
            for i, n in enumerate(order)
        )
        record = ExitRecord(attempt=1, job_id=1, exit_code=1, reason="it failed", time=1.0, node="gpu03")
        cause = attribute(RunView(attempt=1, exit=record, node_reports=reports), None)
        assert (cause.node, cause.blames_node) == ("gpu02", True)
        assert "Xid" in cause.sentence


def test_a_requeue_that_fails_inside_a_container_is_configuration_and_no_nodes_fault() -> None:
    """Case RR-08: `scontrol: not found`, 127:0. The head node resubmits; the node has done nothing."""
    log = "/bin/sh: 1: scontrol: not found\n"
    seen, failed = RunView(attempt=1, log_tail=log), job(state=JobState.FAILED, exit_code=127)
    cause = attribute(seen, failed)
    assert (cause.kind, cause.blames_node, cause.is_curable) == ("configuration", False, False)
    assert "scontrol: not found" in cause.sentence
    ended = judge_end(sight(attempt(), failed, view=seen, causes={"gpt": cause}))
    assert ended is not None
    assert (ended.nodes, ended.is_curable) == ((), False)


def test_a_script_that_can_do_without_what_it_did_not_find_is_not_judged_by_it() -> None:
    seen = RunView(attempt=1, log_tail="/bin/sh: 1: nvcc: not found\n")
    assert attribute(seen, job(state=JobState.FAILED, exit_code=1)).kind == "unknown"
