"""What is copied to object storage, by whom, when; and that nothing of it holds up or harms anything else."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.folders import flip_byte, make_checkpoint
from tests.trainer.objectstore import S3Server
from trainer.contract import (
    MANIFEST_NAME,
    OBJECT_NAME,
    Manifest,
    ManifestFile,
    ObjectRecord,
    RunPaths,
    UploadReport,
    checkpoint_name,
    parse,
    write_json,
)
from trainer.storage.leases import hold_lease, read_leases
from trainer.storage.mover import start_mover
from trainer.storage.stored import Found, read_manifest, remove_checkpoint
from trainer.storage.tiers import LocalTier
from trainer.storage.uploads import Job, Mover, MoverPlace, choose_expired, choose_part, choose_pending


def place_of(tmp_path: Path, **values: Any) -> MoverPlace:
    fields: dict[str, Any] = {
        "run_dir": str(tmp_path / "run"), "run": "gpt", "attempt": 1, "node": 0, "nodes": 1, "world": 2, "node_size": 2,
        "object_url": f"file://{tmp_path}/objects", "poll_s": 0.05, "first_wait_s": 0.05,
    }  # fmt: skip
    return MoverPlace(**{**fields, **values})


def checkpoints(tmp_path: Path) -> Path:
    return RunPaths(tmp_path / "run").checkpoints()


def there(tmp_path: Path) -> list[str]:
    """Checkpoints that are whole in object storage."""
    return sorted(path.parent.name for path in (tmp_path / "objects" / "gpt").glob(f"*/{MANIFEST_NAME}"))


def report(tmp_path: Path, node: int = 0, attempt: int = 1) -> UploadReport:
    return parse(UploadReport, RunPaths(tmp_path / "run").upload_report(attempt, node).read_bytes())


def until(met: Callable[[], bool], within_s: float = 30.0) -> None:
    deadline = time.monotonic() + within_s
    while not met():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.02)


# ---------------------------------------------------------------- decisions


def _found(step: int, attempt: int = 1, *, verified: bool = True) -> Found:
    path = Path("/c") / checkpoint_name(step, attempt)
    return Found(path=path, step=step, attempt=attempt, is_complete=True, is_verified=verified)


def test_only_what_is_verified_and_newer_than_what_is_there_waits_and_the_newest_goes_first() -> None:
    found = [_found(10), _found(20), _found(30), _found(40, verified=False), _found(50, attempt=9)]
    assert choose_pending(found, ["step-10.a1"], attempt=1) == ["step-30.a1", "step-20.a1"]
    assert choose_pending(found, ["step-30.a1"], attempt=1) == []


def test_an_attempt_that_was_sent_back_to_an_earlier_step_is_newer_than_what_it_left_behind() -> None:
    found = [_found(90, 1), _found(60, 2)]
    assert choose_pending(found, ["step-90.a1"], attempt=2) == ["step-60.a2"]
    whole = dict.fromkeys(("step-80.a1", "step-90.a1", "step-60.a2"), True)
    assert choose_expired(whole, keep_last=2, attempt=2) == ["step-80.a1"]


def test_a_course_that_the_service_gave_up_is_neither_copied_nor_counted() -> None:
    suspect = [_found(1000, 1), _found(1200, 1)]
    assert choose_pending([_found(800, 1), *suspect], [], attempt=2, resume_step=800) == ["step-800.a1"]
    assert choose_pending([*suspect, _found(850, 2)], [], attempt=2, resume_step=800) == ["step-850.a2"]
    there = dict.fromkeys(("step-800.a1", "step-1000.a1", "step-1200.a1", "step-850.a2"), True)
    assert choose_expired(there, keep_last=2, attempt=2, resume_step=800) == []
    there["step-900.a2"] = True
    assert choose_expired(there, keep_last=2, attempt=2, resume_step=800) == ["step-800.a1"]


@given(
    there=st.dictionaries(
        st.builds(checkpoint_name, st.integers(0, 30), st.integers(1, 3)), st.booleans(), max_size=12
    ),
    keep_last=st.integers(0, 4),
)
def test_object_storage_keeps_the_newest_whole_ones_and_never_fewer_than_two(
    there: dict[str, bool], keep_last: int
) -> None:
    gone = choose_expired(there, keep_last=keep_last, attempt=3)
    whole = [name for name, is_whole in there.items() if is_whole]
    left = [name for name in whole if name not in gone]
    assert len(left) == min(len(whole), max(2, keep_last))


@given(world=st.integers(1, 8), node_size=st.integers(1, 8), attempt=st.integers(1, 2))
def test_every_file_is_copied_by_exactly_one_node(world: int, node_size: int, attempt: int) -> None:
    names = [".metadata", *(f"__{rank}_0.distcp" for rank in range(5))]
    files = tuple(ManifestFile(path=name, size_bytes=7, xxh3_128="0" * 32) for name in names)
    manifest = Manifest(run="gpt", attempt=1, step=1, samples=1, world_size=5, time=0.0, files=files)
    nodes = -(-world // node_size)
    place = place_of(Path("/"), attempt=attempt, nodes=nodes, world=world, node_size=node_size)
    parts = [choose_part(manifest, replace(place, node=node)) for node in range(nodes)]
    assert sorted(file.path for part in parts for file in part) == sorted(names)
    if (attempt, world, node_size) == (1, 5, 2):
        assert [file.path for file in parts[1]] == ["__2_0.distcp", "__3_0.distcp"]


# ---------------------------------------------------------------- copying


def test_a_verified_checkpoint_is_copied_and_the_run_directory_says_so(tmp_path: Path) -> None:
    path = make_checkpoint(checkpoints(tmp_path), 5)
    mover = Mover(place_of(tmp_path))
    mover.step()
    assert there(tmp_path) == ["step-5.a1"]
    record = parse(ObjectRecord, (path / OBJECT_NAME).read_bytes())
    assert (record.step, record.url) == (5, f"file://{tmp_path}/objects/gpt/step-5.a1")
    assert mover.is_done()
    assert report(tmp_path).uploaded == "step-5.a1"


def test_a_checkpoint_that_is_not_verified_is_not_copied(tmp_path: Path) -> None:
    make_checkpoint(checkpoints(tmp_path), 5, verified=False)
    Mover(place_of(tmp_path)).step()
    assert there(tmp_path) == []


def test_the_last_ones_stay_there_and_older_ones_go(tmp_path: Path) -> None:
    mover = Mover(place_of(tmp_path, keep_last=2))
    for step in (1, 2, 3, 4):
        make_checkpoint(checkpoints(tmp_path), step)
        mover.step()
    assert there(tmp_path) == ["step-3.a1", "step-4.a1"]


def test_nothing_is_pruned_while_it_is_being_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(checkpoints(tmp_path), 5)
    held: list[frozenset[str]] = []
    mover = Mover(place_of(tmp_path))
    copy = mover._copy

    def copy_and_look(job: Job) -> None:
        held.append(read_leases(tmp_path / "run", since_attempt=1))
        copy(job)

    monkeypatch.setattr(mover, "_copy", copy_and_look)
    mover.step()
    assert held == [frozenset({"step-5.a1"})]
    assert read_leases(tmp_path / "run", since_attempt=1) == frozenset()


def test_a_checkpoint_that_is_removed_before_its_turn_is_let_go(tmp_path: Path) -> None:
    path = make_checkpoint(checkpoints(tmp_path), 5)
    mover = Mover(place_of(tmp_path))
    remove_checkpoint(path)
    mover.step()
    assert (there(tmp_path), mover.is_done()) == ([], True)
    assert not path.exists()


def test_a_bad_file_on_the_nodes_disk_is_taken_from_the_shared_file_system(tmp_path: Path) -> None:
    path = make_checkpoint(checkpoints(tmp_path), 5)
    local = LocalTier(tmp_path / "local" / "gpt")
    make_checkpoint(local.root, 5)
    flip_byte(local.path(path.name) / "__0_0.distcp")
    Mover(place_of(tmp_path, local_dir=str(tmp_path / "local"))).step()
    copied = tmp_path / "objects" / "gpt" / path.name / "__0_0.distcp"
    assert copied.read_bytes() == (path / "__0_0.distcp").read_bytes()
    assert not (local.path(path.name) / "__0_0.distcp").exists()


def test_a_checkpoint_that_rotted_after_it_was_verified_is_told_and_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_checkpoint(checkpoints(tmp_path), 4)
    flip_byte(make_checkpoint(checkpoints(tmp_path), 5) / "__0_0.distcp")
    mover = Mover(place_of(tmp_path))
    mover.step()
    assert "__0_0.distcp has 5000 bytes that do not match" in caplog.text
    mover.step()
    assert there(tmp_path) == ["step-4.a1"]


def test_every_node_copies_its_part_and_the_manifest_comes_last(tmp_path: Path) -> None:
    make_checkpoint(checkpoints(tmp_path), 5)
    place = place_of(tmp_path, nodes=2, node_size=1)
    leader, other = Mover(place), Mover(replace(place, node=1))
    leading = threading.Thread(target=leader.step, daemon=True)
    leading.start()
    part = tmp_path / "objects" / "gpt" / "step-5.a1"
    until(lambda: (part / "__0_0.distcp").exists() and report(tmp_path).is_done)
    assert there(tmp_path) == []
    until(lambda: other.step() > 0 and not leading.is_alive())
    assert there(tmp_path) == ["step-5.a1"]
    assert (part / "__1_0.distcp").exists()


def test_a_new_attempt_of_another_size_goes_on_with_what_the_old_one_left(tmp_path: Path) -> None:
    make_checkpoint(checkpoints(tmp_path), 5, attempt=1)
    Mover(place_of(tmp_path, attempt=2, world=1, node_size=1)).step()
    assert there(tmp_path) == ["step-5.a1"]


# ---------------------------------------------------------------- storage that misbehaves


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    running = S3Server(tmp_path / "server")
    for name, value in running.environment().items():
        monkeypatch.setenv(name, value)
    yield running
    running.kill()


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        r.getMessage() for r in caplog.records if r.name == "trainer.storage.uploads" and r.levelno >= logging.WARNING
    ]


@pytest.mark.s3
def test_storage_that_is_away_costs_one_warning_and_only_the_newest_checkpoint_is_copied_afterwards(
    server: S3Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mover = Mover(place_of(tmp_path, object_url=server.url))
    delays = []
    for step in (1, 2, 3):
        make_checkpoint(checkpoints(tmp_path), step)
        delays.append(mover.step())
    assert delays[2] > delays[0]
    assert (report(tmp_path).failures, report(tmp_path).pending) == (3, 3)
    assert "127.0.0.1" in report(tmp_path).error
    server.start()
    mover.step()
    said = _warnings(caplog)
    assert len(said) == 2
    assert "working again after 3 failed tries" in said[1]
    assert {key.split("/")[1] for key in server.objects()} == {"step-3.a1"}
    assert (report(tmp_path).failures, report(tmp_path).error) == (0, "")


@pytest.mark.s3
def test_wrong_credentials_are_told_once_and_clearly(
    server: S3Server, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.start()
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    make_checkpoint(checkpoints(tmp_path), 5)
    mover = Mover(place_of(tmp_path, object_url=server.url))
    mover.step()
    mover.step()
    (said,) = _warnings(caplog)
    assert "look at the credentials" in said
    assert server.objects() == []


@pytest.mark.s3
def test_a_server_that_is_killed_in_the_middle_is_tried_again_by_the_process_beside_the_training(
    server: S3Server, tmp_path: Path
) -> None:
    server.start()
    path = make_checkpoint(checkpoints(tmp_path), 5, shard_bytes=20_000_000)
    place = place_of(tmp_path, object_url=server.url, bytes_per_s=20e6)
    mover = start_mover(place)
    assert mover is not None
    try:
        until(lambda: any(server.root.rglob(".rclone_temp*")))  # into the first file
        server.kill()
        until(lambda: report(tmp_path).failures > 0)
        server.start()
        assert mover.close(wait_s=60)
    finally:
        mover.close()
    assert f"gpt/{path.name}/{MANIFEST_NAME}" in server.objects()
    for file in read_manifest(path).files:
        assert server.object(f"gpt/{path.name}/{file.path}").read_bytes() == (path / file.path).read_bytes()


@pytest.mark.s3
@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_server_that_is_slow_or_hangs_holds_up_the_copy_and_nobody_else(
    server: S3Server, tmp_path: Path, is_frozen: bool
) -> None:
    server.start(bwlimit="2M")
    if is_frozen:
        server.freeze()
    make_checkpoint(checkpoints(tmp_path), 5, shard_bytes=10_000_000)
    mover = start_mover(place_of(tmp_path, object_url=server.url))
    assert mover is not None
    until(lambda: RunPaths(tmp_path / "run").upload_lease(1).exists())
    began = time.monotonic()
    assert not mover.close()
    assert time.monotonic() - began < 10
    assert not any(key.endswith(MANIFEST_NAME) for key in server.objects())


@pytest.mark.s3
def test_the_end_of_a_training_does_not_wait_long_for_storage_that_is_away(server: S3Server, tmp_path: Path) -> None:
    make_checkpoint(checkpoints(tmp_path), 5)
    mover = start_mover(place_of(tmp_path, object_url=server.url, first_wait_s=0.01))
    assert mover is not None
    assert not mover.close(wait_s=120)
    assert report(tmp_path).failures >= 5


def test_at_the_end_no_node_waits_for_one_that_leads_it_in_vain(tmp_path: Path) -> None:
    make_checkpoint(checkpoints(tmp_path), 5)
    place = place_of(tmp_path, nodes=2, node_size=1, object_url="file:///proc/nope", first_wait_s=0.01)
    movers = [start_mover(replace(place, node=node)) for node in (0, 1)]
    ended: list[bool] = []
    closing = [
        threading.Thread(target=lambda mover=mover: ended.append(mover.close(wait_s=600)), daemon=True)
        for mover in movers
    ]
    for thread in closing:
        thread.start()
    until(lambda: len(ended) == 2, within_s=60)
    assert ended == [False, False]


def test_at_the_end_a_node_whose_part_is_there_ends_whatever_the_others_are_at(tmp_path: Path) -> None:
    make_checkpoint(checkpoints(tmp_path), 5)
    place = place_of(tmp_path, nodes=3, node_size=1)
    follower = Mover(replace(place, node=1))
    assert not follower.is_done()
    with hold_lease(RunPaths(tmp_path / "run").upload_lease(1), attempt=1, names=["step-5.a1"]):
        follower.step()
    assert follower.is_done()


def test_at_the_end_the_leader_goes_without_a_node_that_fails(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_checkpoint(checkpoints(tmp_path), 5)
    place = place_of(tmp_path, nodes=2, node_size=1)
    failing = UploadReport(attempt=1, node=1, checkpoint="step-5.a1", failures=2, error="no route", time=0.0)
    write_json(RunPaths(tmp_path / "run").upload_report(1, 1), failing)
    leader = Mover(place, is_ending=lambda: True)
    leader.step()
    assert leader.is_failing
    assert "node 1 can't copy its part: no route" in caplog.text


def test_at_the_end_a_copy_that_gets_on_nowhere_is_left(tmp_path: Path) -> None:
    make_checkpoint(checkpoints(tmp_path), 5)
    script = "import sys, trainer.storage.mover as m; m.DRAIN_IDLE_S = 0.5; sys.exit(m.main(sys.argv))"
    place = json.dumps(vars_of(place_of(tmp_path, nodes=2, node_size=1)))  # there is no other node
    mover = subprocess.Popen([sys.executable, "-c", script, place], stdin=subprocess.PIPE, text=True)
    try:
        assert mover.stdin is not None
        mover.stdin.write("drain\n")
        mover.stdin.flush()
        assert mover.wait(30) == 1
    finally:
        mover.kill()
        mover.communicate(timeout=30)


# ---------------------------------------------------------------- the process


def test_the_process_copies_what_is_left_before_it_is_closed(tmp_path: Path) -> None:
    mover = start_mover(place_of(tmp_path, poll_s=60))
    assert mover is not None
    make_checkpoint(checkpoints(tmp_path), 5)
    mover.poke()
    assert mover.close(wait_s=60)
    assert there(tmp_path) == ["step-5.a1"]


def test_the_process_ends_with_its_parent_and_heeds_no_signal_of_the_training(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys, time\n"
        "from trainer.storage.mover import MoverPlace, start_mover\n"
        f"mover = start_mover(MoverPlace(**{vars_of(place_of(tmp_path))!r}))\n"
        "print(mover.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        make_checkpoint(checkpoints(tmp_path), 5)
        until(lambda: there(tmp_path) == ["step-5.a1"])
        os.kill(pid, 10)
        os.kill(pid, 15)
        make_checkpoint(checkpoints(tmp_path), 6)
        until(lambda: there(tmp_path) == ["step-5.a1", "step-6.a1"])
        parent.kill()
        until(lambda: _is_gone(pid))
    finally:
        parent.kill()
        parent.communicate(timeout=30)


def vars_of(place: MoverPlace) -> dict[str, Any]:
    return {name: getattr(place, name) for name in place.__dataclass_fields__}


def _is_gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state == "Z"
