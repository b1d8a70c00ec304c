"""A node that a person has set DOWN is theirs, as a drained one is."""

from __future__ import annotations

import pytest

from slurm.types import NodeBase
from supervisor.core.nodes import judge_drift
from supervisor.model import Verdict
from tests.core.builders import LATER, NOW, broken, node


@pytest.mark.parametrize(
    ("flags", "reason", "is_theirs"),
    [
        ((), "psu, ask Kim", True),
        (("DRAIN",), "psu, ask Kim", True),
        ((), "", False),
        ((), "Node unexpectedly rebooted", False),
        (("NOT_RESPONDING",), "Not responding", False),
    ],
)
def test_a_node_is_withdrawn_by_a_drain_or_by_a_reason_that_is_not_slurms(
    flags: tuple[str, ...], reason: str, is_theirs: bool
) -> None:
    assert node("n1", NodeBase.DOWN, *flags, reason=reason).is_withdrawn is is_theirs


def test_a_node_that_a_person_set_down_and_returned_is_healthy_again() -> None:
    seen = judge_drift(broken("n1"), node("n1", NodeBase.DOWN, reason="psu, ask Kim"), NOW)
    assert seen is not None
    assert (seen.verdict, seen.is_drained_by_us) == (Verdict.BROKEN, False)
    returned = judge_drift(seen, node("n1"), LATER)
    assert returned is not None
    assert returned.verdict is Verdict.HEALTHY
