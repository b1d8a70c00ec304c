"""Reasons of waiting jobs, in the words of squeue and of scontrol."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm.pending import PendingKind, PendingReason, classify_pending, is_launch_failure


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("Priority", "waits"),
        ("Resources", "waits"),
        ("Dependency", "waits"),
        ("BeginTime", "waits"),
        ("QOSMaxJobsPerUserLimit", "waits"),
        ("AssocGrpNodeLimit", "waits"),
        ("", "waits"),
        ("SomethingNew", "waits"),
        ("DependencyNeverSatisfied", "blocked"),
        ("AssocMaxWallDurationPerJobLimit", "blocked"),
        ("QOSMaxNodePerJobLimit", "blocked"),
        ("QOSMaxGRESPerJob", "blocked"),
        ("PartitionNodeLimit", "blocked"),
        ("PartitionTimeLimit", "blocked"),
        ("BadConstraints", "blocked"),
        ("InvalidQOS", "blocked"),
        ("QOSMinGRES", "blocked"),
        ("AssocMaxCpuPerNode", "blocked"),
        ("QOSNotAllowed", "blocked"),
        ("AccountNotAllowed", "blocked"),
        ("MaxMemPerLimit", "blocked"),
        ("DeadLine", "blocked"),
        ("MaxJobsPerAccount", "waits"),
        ("QOSGrpCpuLimit", "waits"),
        ("JobArrayTaskLimit", "waits"),
        ("Licenses", "waits"),
        ("ReservationDeleted", "held"),
        ("JobHoldMaxRequeue", "held"),
        ("JobHeldUser", "held"),
        ("JobHeldAdmin", "held"),
        ("launch failed requeued held", "held"),
        ("launch_failed_requeued_held", "held"),
        ("ReqNodeNotAvail", "nodes"),
        ("Nodes required for job are DOWN, DRAINED or reserved", "nodes"),
    ],
)
def test_a_reason_says_what_becomes_of_the_job(reason: str, kind: str) -> None:
    assert classify_pending(reason).kind is PendingKind(kind)


@pytest.mark.parametrize(
    "reason",
    [
        "(ReqNodeNotAvail, UnavailableNodes:gpu[03-04])",
        "ReqNodeNotAvail, UnavailableNodes:gpu[03-04]",
        "ReqNodeNotAvail,_UnavailableNodes:gpu[03-04]",
    ],
)
def test_unavailable_nodes_are_named(reason: str) -> None:
    assert classify_pending(reason) == PendingReason(kind=PendingKind.NODES, nodes=("gpu03", "gpu04"))


@given(reason=st.one_of(st.text(), st.text(alphabet="n[]-1,").map("UnavailableNodes:".__add__)))
def test_any_reason_is_classified(reason: str) -> None:
    assert classify_pending(reason).kind in PendingKind
    assert isinstance(is_launch_failure(reason), bool)
