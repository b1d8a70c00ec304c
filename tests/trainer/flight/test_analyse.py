"""Who keeps a training from going on, by its ranks' dumps: of real gloo trainings, and of NCCL as it writes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.flight.nccl_dumps import dump, entry
from trainer.flight.analyse import KINDS, Finding, analyse, analyse_folder
from trainer.flight.reader import read_dump
from trainer.flight.words import name_ranks

DATA = Path(__file__).parents[2] / "data" / "flight"
WORLD = {"0": "[0, 1, 2, 3]"}


@pytest.mark.parametrize(
    ("scenario", "kind", "culprits", "is_program_fault", "words"),
    [
        ("all_well", "none", (), False, "no rank waits"),
        ("sleeper", "absent", (2,), False, "rank 2 did not join all_reduce #4 of group 0 (default_pg)"),
        ("other_op", "mismatch", (1,), True, "rank 1 broadcast of 16x4 Float"),
        ("other_size", "mismatch", (1,), True, "rank 1 all_reduce of 8x4 Float"),
        ("other_dtype", "mismatch", (1,), True, "rank 1 all_reduce of 16x4 Int"),
        ("other_order", "order", (3,), True, "rank 3 first all_reduce #1 of group 2"),
        ("killed", "absent", (3,), False, "no dump of rank 3"),
        ("chain", "absent", (3,), False, "rank 3 did not join"),
        ("skipped", "mismatch", (1,), True, "ranks 0, 2-3 all_gather of 1 Long"),
    ],
)
def test_a_real_training_that_was_stopped_is_told_by_its_dumps(
    scenario: str, kind: str, culprits: tuple[int, ...], is_program_fault: bool, words: str
) -> None:
    found = analyse_folder(DATA / scenario, 4)
    assert found is not None
    assert (found.kind, found.culprits, found.is_program_fault) == (kind, culprits, is_program_fault)
    assert words in found.sentence


def judge(
    ranks: Mapping[int, Sequence[Mapping[str, Any]]], *, groups: Mapping[str, str] = WORLD, world: int = 4
) -> Finding:
    found = analyse({rank: read_dump(dump(entries, groups=groups)) for rank, entries in ranks.items()}, world)
    assert found.kind in KINDS
    return found


def well(*seqs: int, **others: Any) -> list[dict[str, Any]]:
    return [entry(seq, **others) for seq in seqs]


WAITS = [*well(1, 2), entry(3, state="started")]


def test_a_rank_that_did_not_come_is_named_and_who_waited_first_is_told() -> None:
    late = [*well(1, 2), entry(3, state="started", at_s=5.0)]
    found = judge({0: late, 1: well(1, 2), 2: WAITS, 3: late})
    assert (found.kind, found.culprits, found.confidence) == ("absent", (1,), "high")
    assert found.stuck[0].first == 2
    assert found.stuck[0].waiting == (0, 2, 3)
    assert "rank 2 first at train.py:43" in found.sentence
    assert "rank 1 last called all_reduce #2 of group 0 at train.py:42" in found.sentence


def test_ranks_without_a_dump_are_told_beside_a_rank_that_did_not_come() -> None:
    found = judge({0: WAITS, 1: well(1, 2), 2: WAITS})
    assert (found.culprits, found.confidence, found.no_dump) == ((1,), "medium", (3,))
    assert "no dump of rank 3" in found.sentence


def test_ranks_without_a_dump_are_suspects_when_all_others_wait_and_less_so_when_they_are_many() -> None:
    """TE-08: the suspect is the rank that is missing from the collective; those that report a time-out are victims."""
    one = judge({0: WAITS, 1: WAITS, 2: WAITS})
    assert (one.kind, one.culprits, one.confidence) == ("absent", (3,), "medium")
    many = judge({0: WAITS})
    assert (many.culprits, many.confidence) == ((1, 2, 3), "low")


@pytest.mark.parametrize(
    "other",
    [
        entry(3, op="all_gather", state="scheduled"),
        entry(3, sizes=((4,),), state="scheduled"),
        entry(3, dtype="BFloat16", state="scheduled"),
    ],
)
def test_a_rank_that_calls_something_else_is_a_fault_of_the_program(other: Mapping[str, Any]) -> None:
    found = judge({0: WAITS, 1: WAITS, 2: WAITS, 3: [*well(1, 2), other]})
    assert (found.kind, found.culprits, found.confidence) == ("mismatch", (3,), "high")
    assert found.is_program_fault


def test_where_half_the_ranks_differ_all_are_told() -> None:
    other = [*well(1, 2), entry(3, op="broadcast", state="scheduled")]
    found = judge({0: WAITS, 1: WAITS, 2: other, 3: other})
    assert (found.culprits, found.confidence) == ((0, 1, 2, 3), "medium")


def test_sizes_that_may_differ_are_no_disagreement() -> None:
    ranks = {rank: [*well(1, 2), entry(3, op="all_to_all", sizes=((rank + 1,),), state="started")] for rank in range(4)}
    assert judge(ranks).kind == "stuck_together"
    shaped = {rank: [entry(1, sizes=((4, 2),) if rank else ((8,),), state="started")] for rank in range(4)}
    assert judge(shaped).kind == "stuck_together"


def test_a_chain_of_groups_is_followed_to_the_rank_that_waits_for_nobody() -> None:
    groups = {**WORLD, "tp0": "[0, 1]", "tp1": "[2, 3]", "dp0": "[0, 2]", "dp1": "[1, 3]"}

    def waits(group: str, number: int, at_s: float) -> list[dict[str, Any]]:
        return [*well(1), entry(1, group=group, description="mesh", number=number, state="started", at_s=at_s)]

    found = judge(
        {0: waits("dp0", 2, 1.0), 1: waits("dp1", 2, 0.5), 2: waits("tp1", 1, 2.0), 3: well(1)}, groups=groups
    )
    assert (found.kind, found.culprits) == ("absent", (3,))
    assert "further stuck" in found.sentence
    assert {stuck.absent for stuck in found.stuck} == {(2,), (3,)}


def test_groups_that_share_a_name_are_told_apart_by_their_ranks() -> None:
    ranks = {0: WAITS, 1: well(1, 2), 2: well(1), 3: well(1)}
    dumps = {
        rank: read_dump(dump(entries, groups={"0": "[0, 1]" if rank < 2 else "[2, 3]"}))
        for rank, entries in ranks.items()
    }
    found = analyse(dumps, 4)
    assert (found.culprits, len(found.stuck)) == ((1,), 1)


def test_groups_used_in_different_orders_are_a_fault_of_the_program() -> None:
    groups = {"a": "[0, 1, 2, 3]", "b": "[0, 1, 2, 3]"}

    def in_order(*names: str) -> list[dict[str, Any]]:
        return [entry(1, group=name, state="scheduled", at_s=float(n)) for n, name in enumerate(names)]

    both = {0: in_order("a", "b"), 1: in_order("a", "b"), 2: in_order("a", "b"), 3: in_order("b", "a")}
    found = judge(both, groups=groups)
    assert (found.kind, found.culprits, found.is_program_fault) == ("order", (3,), True)
    one = {0: in_order("a"), 1: in_order("a"), 2: in_order("a"), 3: in_order("b")}
    assert judge(one, groups=groups).kind == "order"


def test_groups_of_different_ranks_that_are_both_stuck_are_no_matter_of_order() -> None:
    groups = {"a": "[0, 1]", "b": "[2, 3]"}
    ranks = {rank: [entry(1, group="a" if rank < 2 else "b", state="started")] for rank in range(4)}
    assert judge(ranks, groups=groups).kind == "stuck_together"
    joined = {"a": "[0, 1, 2]", "b": "[2, 3]"}
    ranks[2] = [entry(1, group="a", state="started"), *ranks[2]]
    assert judge(ranks, groups=joined).kind == "stuck_together"


def test_a_disagreement_shortly_before_the_stuck_collective_is_its_cause() -> None:
    other = [*well(1), entry(2, dtype="Half"), entry(3, state="started")]
    found = judge({0: WAITS, 1: WAITS, 2: other, 3: WAITS})
    assert (found.kind, found.culprits, found.stuck[0].seq, found.stuck[0].differing_at) == ("mismatch", (2,), 3, 2)
    assert "rank 2 all_reduce of 8 Half" in found.sentence


def test_a_disagreement_that_nobody_waits_for_is_told_where_it_was() -> None:
    found = judge(
        {0: well(1, 2, 3), 1: well(1, 2, 3), 2: [*well(1), entry(2, dtype="Half"), *well(3)], 3: well(1, 2, 3)}
    )
    assert (found.kind, found.culprits, found.stuck[0].seq, found.stuck[0].is_pending) == ("mismatch", (2,), 2, False)


@pytest.mark.parametrize(("op", "side"), [("gather", "output"), ("scatter", "input")])
def test_what_only_the_root_has_is_no_disagreement_and_what_all_have_is(op: str, side: str) -> None:
    def call(**others: Any) -> list[dict[str, Any]]:
        return [entry(1, op=op, state="started", **others)]

    at_root = {f"{side}_sizes": [[8]] * 4, f"{side}_dtypes": ["Float"] * 4}
    elsewhere: dict[str, Any] = {f"{side}_sizes": [], f"{side}_dtypes": []}
    ranks = {0: call(**at_root), **{rank: call(**elsewhere) for rank in (1, 2, 3)}}
    assert judge(ranks).kind == "stuck_together"
    ranks[3] = call(**elsewhere, **{("input" if side == "output" else "output") + "_sizes": [[9]]})
    assert judge(ranks).culprits == (3,)


def test_a_rank_that_is_a_collective_ahead_does_not_wait_for_the_one_that_is_stuck() -> None:
    ahead = [*well(1, 2, 3), entry(4, state="started")]
    found = judge({0: ahead, 1: WAITS, 2: ahead, 3: ahead})
    assert (found.stuck[0].seq, found.stuck[0].waiting, found.stuck[0].done) == (3, (1,), (0, 2, 3))
    assert (found.kind, found.culprits) == ("unfinished", (1,))


def test_of_many_calls_that_were_made_ahead_the_first_that_does_not_end_is_the_stuck_one() -> None:
    ahead = [*well(1, 2), entry(3, state="started"), *(entry(seq, state="scheduled") for seq in (4, 5, 6))]
    found = judge({0: ahead, 1: well(1, 2), 2: ahead, 3: ahead})
    assert (found.stuck[0].seq, found.stuck[0].waiting, found.culprits) == (3, (0, 2, 3), (1,))


def test_a_disagreement_right_after_a_call_that_has_not_been_seen_to_end_everywhere_is_found() -> None:
    late = [*well(1), entry(2, state="started"), entry(3, dtype="Half", state="scheduled")]
    found = judge({0: WAITS, 1: late, 2: WAITS, 3: WAITS})
    assert (found.kind, found.culprits, found.stuck[0].differing_at) == ("mismatch", (1,), 3)


def test_a_rank_without_entries_and_status_has_called_nothing() -> None:
    dumps = {rank: read_dump(dump([entry(1, state="started")], groups={"0": "[0, 1]"})) for rank in (0,)}
    dumps[1] = read_dump(dump([], groups={"0": "[0, 1]"}, pg_status={}))
    found = analyse(dumps, 2)
    assert (found.culprits, found.stuck[0].reached) == ((1,), {0: 1, 1: 0})


def test_half_of_two_ranks_without_a_dump_is_a_few() -> None:
    found = judge({0: [entry(1, state="started")]}, groups={"0": "[0, 1]"}, world=2)
    assert (found.culprits, found.confidence) == ((1,), "medium")


def test_what_limits_a_finding_is_noted_and_nothing_else() -> None:
    assert judge(dict.fromkeys(range(4), WAITS)).notes == ()
    newer = {rank: read_dump(dump(WAITS, groups=WORLD, version="3.1")) for rank in range(4)}
    (note,) = analyse(newer, 4).notes
    assert "3.1" in note
    unplaced = {rank: read_dump(dump(WAITS, groups={})) for rank in range(2)}
    assert any("how many ranks" in note for note in analyse(unplaced).notes)
    assert judge(dict.fromkeys(range(4), WAITS), world=0).notes == ()


def test_who_belongs_to_a_group_of_gloo_is_not_known_and_said() -> None:
    found = analyse_folder(DATA / "chain", 4)
    assert found is not None
    assert (found.confidence, [stuck.has_members for stuck in found.stuck]) == ("medium", [False] * 3)
    assert any("nobody tells which ranks belong" in note for note in found.notes)


def test_several_entries_of_one_number_are_over_when_all_are() -> None:
    twice = [entry(1), entry(1, op="all_gather", state="started")]
    assert judge(dict.fromkeys(range(4), twice)).kind == "stuck_together"


def test_a_rank_that_does_not_tell_a_group_s_members_is_taken_for_one_of_those_that_others_tell() -> None:
    dumps = {rank: read_dump(dump(WAITS, groups={"0": "[0, 1, 2]"})) for rank in (0, 1)}
    dumps[2] = read_dump(dump(well(1, 2), groups={}))
    found = analyse(dumps, 3)
    assert (found.culprits, len(found.stuck)) == ((2,), 1)


def test_a_gpu_that_has_not_begun_what_the_others_have_is_named() -> None:
    held_up = [*well(1, 2), entry(3, state="scheduled")]
    found = judge({0: WAITS, 1: held_up, 2: WAITS, 3: WAITS})
    assert (found.kind, found.culprits, found.is_program_fault) == ("blocked", (1,), False)


def test_a_collective_that_has_ended_for_some_only_names_the_others_without_certainty() -> None:
    found = judge({0: well(1, 2, 3), 1: well(1, 2, 3), 2: well(1, 2, 3), 3: WAITS})
    assert (found.kind, found.culprits, found.confidence) == ("unfinished", (3,), "low")


def test_a_collective_that_all_have_called_and_none_has_ended_names_nobody() -> None:
    found = judge(dict.fromkeys(range(4), WAITS))
    assert (found.kind, found.culprits) == ("stuck_together", ())


def test_a_coalesced_call_is_over_when_its_end_marker_is() -> None:
    parts = [entry(2, op=op, state="scheduled") for op in ("all_gather", "all_gather")]
    ended = [*well(1), *parts, entry(2, op="coalesced")]
    assert judge(dict.fromkeys(range(4), ended)).kind == "none"
    open_ended = [*well(1), *parts, entry(2, op="coalesced", state="started")]
    found = judge({0: open_ended, 1: open_ended, 2: open_ended, 3: well(1)})
    assert (found.kind, found.culprits) == ("absent", (3,))
    assert "all_gather #2" in found.sentence


def send(rank: int, peer: int, state: str) -> dict[str, Any]:
    return entry(0, op=f"send {rank}->{peer}", is_p2p=True, p2p_seq=1, state=state)


def receive(rank: int, peer: int, state: str) -> dict[str, Any]:
    return entry(0, op=f"recv {rank}<-{peer}", is_p2p=True, p2p_seq=1, state=state)


def test_sends_and_receives_that_have_ended_confuse_nothing() -> None:
    found = judge(
        {0: [*WAITS, send(0, 1, "completed")], 1: [*well(1, 2), receive(1, 0, "completed")], 2: WAITS, 3: WAITS}
    )
    assert (found.kind, found.culprits) == ("absent", (1,))


def test_a_receive_whose_sender_is_elsewhere_names_the_sender() -> None:
    chain = {
        0: well(1),  # the first stage computes for ever
        1: [*well(1), receive(1, 0, "started")],
        2: [*well(1), receive(2, 1, "started")],
        3: [*well(1), receive(3, 2, "started")],
    }
    found = judge(chain)
    assert (found.kind, found.culprits) == ("absent", (0,))
    assert "has not called the other half" in found.sentence


def test_the_numbers_in_a_send_are_those_within_its_group() -> None:
    groups = {"pp": "[1, 3]"}
    waits = entry(0, op="send 0->1", group="pp", is_p2p=True, p2p_seq=1, state="started")
    idle = entry(1, group="pp")
    found = judge({0: [], 1: [entry(1, group="pp"), waits], 2: [], 3: [idle]}, groups=groups)
    assert (found.stuck[0].waiting, found.culprits) == ((1,), (3,))


def test_a_send_that_its_receiver_waits_for_too_names_nobody() -> None:
    found = judge(
        {0: [*well(1), send(0, 1, "started")], 1: [*well(1), receive(1, 0, "started")], 2: well(1), 3: well(1)}
    )
    assert (found.kind, found.culprits, found.stuck[0].waiting) == ("stuck_together", (), (0, 1))
    assert "both halves" in found.sentence


def test_a_receiver_without_a_dump_is_a_suspect() -> None:
    found = judge({0: [*well(1), send(0, 1, "started")], 2: well(1), 3: well(1)})
    assert (found.culprits, found.no_dump) == ((1,), (1,))


def test_a_rank_whose_entries_have_fallen_out_is_judged_by_its_status() -> None:
    empty: dict[str, Any] = {
        "pg_status": {
            "0": {"last_enqueued_collective": 2, "last_started_collective": -1, "last_completed_collective": 2}
        }
    }
    dumps = {rank: read_dump(dump(WAITS, groups=WORLD)) for rank in range(3)}
    dumps[3] = read_dump(dump([], groups=WORLD, **empty))
    assert analyse(dumps, 4).culprits == (3,)


def test_more_calls_of_some_ranks_while_nobody_waits_are_told_without_certainty() -> None:
    found = judge({0: well(1, 2, 3), 1: well(1, 2), 2: well(1, 2, 3), 3: well(1, 2, 3)})
    assert (found.kind, found.culprits, found.confidence) == ("absent", (1,), "low")
    assert any("nothing is pending" in note for note in found.notes)


def test_the_number_of_ranks_is_taken_from_the_groups_when_nobody_gives_it() -> None:
    assert judge({0: WAITS, 1: WAITS, 2: WAITS}, world=0).no_dump == (3,)


def test_a_folder_without_a_readable_dump_tells_nothing(tmp_path: Path) -> None:
    (tmp_path / "fr_trace_rank_0").write_bytes(b"?")
    assert analyse_folder(tmp_path, 4) is None


def test_a_dump_that_can_t_be_read_is_told_and_lowers_what_is_said_of_its_rank(tmp_path: Path) -> None:
    for rank in range(3):
        (tmp_path / f"fr_trace_rank_{rank}").write_bytes(dump(WAITS, groups=WORLD))
    (tmp_path / "fr_trace_rank_3").write_bytes(b"?")
    found = analyse_folder(tmp_path, 4)
    assert found is not None
    assert (found.culprits, found.confidence) == ((3,), "low")
    assert any("fr_trace_rank_3" in note for note in found.notes)


def test_a_dump_that_can_t_be_read_takes_nothing_from_what_is_said_of_another_rank(tmp_path: Path) -> None:
    for rank in range(3):
        entries = WAITS if rank else well(1, 2)
        (tmp_path / f"fr_trace_rank_{rank}").write_bytes(dump(entries, groups=WORLD))
    (tmp_path / "fr_trace_rank_3").write_bytes(b"?")
    found = analyse_folder(tmp_path, 4)
    assert found is not None
    assert (found.culprits, found.confidence) == ((0,), "medium")


def test_ranks_are_named_in_ranges() -> None:
    assert [name_ranks(ranks) for ranks in ((3,), (0, 1, 2, 5), ())] == ["rank 3", "ranks 0-2, 5", "nobody"]
