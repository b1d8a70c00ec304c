from __future__ import annotations

from supervisor.attribution.torchrun import parse_failures

HEAD = "=" * 60 + "\ntrain.py FAILED\n" + "-" * 60 + "\n"


def entry(index: int, rank: int, code: int, traceback: str) -> str:
    return (
        f"[{index}]:\n  time      : 2026-03-02_16:48:31\n  host      : gpu03\n"
        f"  rank      : {rank} (local_rank: {rank})\n"
        f"  exitcode  : {code} (pid: 4732)\n  error_file: <N/A>\n  traceback : {traceback}\n"
    )


def block(others: str, root: str) -> str:
    return (
        HEAD + "Failures:\n" + others + "-" * 60 + "\nRoot Cause (first observed failure):\n" + root + "=" * 60 + "\n"
    )


def test_both_entries_are_read_and_the_root_is_marked() -> None:
    """TE-07"""
    text = block(entry(1, 6, -15, "Signal 15 (SIGTERM) received"), entry(0, 4, -9, "Signal 9 (SIGKILL) received"))
    other, root = parse_failures(text)
    assert (other.rank, other.signal, other.is_root) == (6, 15, False)
    assert (root.rank, root.signal, root.host, root.is_root) == (4, 9, "gpu03", True)


def test_no_other_failures_is_an_empty_list() -> None:
    """TE-07"""
    (root,) = parse_failures(block("  <NO_OTHER_FAILURES>\n", entry(0, 4, 42, "x")))
    assert (root.exit_code, root.signal) == (42, None)


def test_a_traceback_of_many_lines_stays_with_its_entry() -> None:
    """TE-07"""
    lines = 'Traceback (most recent call last):\n    File "t.py", line 3\n      rank      : of nobody\n  ValueError: x'
    other, root = parse_failures(block(entry(1, 6, 1, lines), entry(0, 4, 1, "x")))
    assert other.rank == 6
    assert other.traceback.splitlines()[-1].strip() == "ValueError: x"
    assert root.traceback == "x"


def test_blocks_of_several_agents_add_up() -> None:
    one = block("  <NO_OTHER_FAILURES>\n", entry(0, 4, -9, "x"))
    assert len(parse_failures(one + "noise\n" + one)) == 2


def test_a_block_that_was_cut_gives_what_is_there() -> None:
    text = block(entry(1, 6, -15, "x"), entry(0, 4, -9, "x"))
    for end in range(len(text)):
        assert len(parse_failures(text[:end])) <= 2
