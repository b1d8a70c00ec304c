"""Nobody publishes over somebody else: one Checkpointer, one start of an attempt, one attempt of a number."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.trainer.ranks import await_true
from trainer import contract
from trainer.contract import RunPaths, parse, write_json
from trainer.session.claims import (
    Claim,
    ClaimLost,
    RunDirectoryInUse,
    check_claim,
    claim_given,
    claim_next,
    take_seat,
    why_taken,
)
from trainer.storage.stored import find_checkpoints

if TYPE_CHECKING:
    from trainer.checkpoint import Checkpointer

ROOT = Path(__file__).resolve().parents[2]
# Says that it has a claim, or why not, and lives on until its input ends.
HOLD = """
import sys
from pathlib import Path
from trainer.session.claims import RunDirectoryInUse, claim_given, claim_next
run_dir = Path(sys.argv[1])
try:
    claim = claim_given(run_dir, 3, patience_s=0.2) if sys.argv[2] == "given" else claim_next(run_dir)
    print(claim.attempt, flush=True)
except RunDirectoryInUse as error:
    print(error, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a process that runs a script."""
    started: list[subprocess.Popen[str]] = []

    def run(script: str, *arguments: str) -> subprocess.Popen[str]:
        started.append(
            subprocess.Popen(
                [sys.executable, "-c", script, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )
        )
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.communicate()


def _said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def _claim(run_dir: Path, attempt: int = 3) -> Claim:
    return parse(Claim, RunPaths(run_dir).claim(attempt).read_bytes())


def _take_over_from_elsewhere(run_dir: Path, attempt: int = 3) -> None:
    """What a start of the attempt on another host does to its claim."""
    found = _claim(run_dir, attempt)
    write_json(RunPaths(run_dir).claim(attempt), replace(found, token="theirs", replaced=found.token, host="node7"))


# ---------------------------------------------------------------- without a service


def test_processes_that_start_at_once_get_numbers_of_their_own(
    tmp_path: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    processes = [start(HOLD, str(tmp_path), "next") for _ in range(6)]
    assert sorted(int(_said(process)) for process in processes) == [1, 2, 3, 4, 5, 6]


def test_a_number_that_somebody_has_taken_in_between_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "attempts" / "4").mkdir(parents=True)
    monkeypatch.setattr("trainer.session.claims.next_attempt", lambda _: 4)
    assert claim_next(tmp_path).attempt == 5


def test_a_run_directory_that_takes_no_file_yet_is_claimed_by_the_first_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, record: object) -> None:
        raise OSError(28, "No space left on device", str(path))

    with monkeypatch.context() as full:
        full.setattr("trainer.session.claims.write_json", refuse)
        claims = [claim_given(tmp_path, 3), claim_given(tmp_path, 3)]
    check_claim(tmp_path, claims[0])
    check_claim(tmp_path, claims[0])
    with pytest.raises(ClaimLost):
        check_claim(tmp_path, claims[1])


# ---------------------------------------------------------------- under a service


def test_a_second_training_of_an_attempt_is_refused_while_the_first_runs_on_this_host(
    tmp_path: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    first = start(HOLD, str(tmp_path), "given")
    assert _said(first) == "3"
    with pytest.raises(RunDirectoryInUse, match=f"process {first.pid} of .* is training attempt 3 already"):
        claim_given(tmp_path, 3, patience_s=0.2)
    assert _claim(tmp_path).pid == first.pid


def test_workers_that_are_restarted_in_place_go_on_at_once(
    tmp_path: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    first = start(HOLD, str(tmp_path), "given")
    assert _said(first) == "3"
    old = _claim(tmp_path)
    first.kill()  # nobody has waited for it
    began = time.monotonic()
    claim = claim_given(tmp_path, 3, patience_s=60)
    assert time.monotonic() - began < 30
    check_claim(tmp_path, claim)
    with pytest.raises(ClaimLost, match=f"attempt 3 is no longer this training's: process {os.getpid()} of "):
        check_claim(tmp_path, old)


def test_a_holder_that_is_stopped_may_never_end_and_is_not_waited_for_for_ever(
    tmp_path: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    first = start(HOLD, str(tmp_path), "given")
    assert _said(first) == "3"
    first.send_signal(signal.SIGSTOP)
    await_true(lambda: Path(f"/proc/{first.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
    held = _claim(tmp_path)
    assert claim_given(tmp_path, 3, patience_s=0.2).replaced == held.token


@pytest.mark.parametrize("change", [{"host": "node7"}, {"boot": "another"}, {"pid_space": "another"}, {"started": 1}])
def test_a_process_that_can_not_be_seen_from_here_does_not_hold_a_newer_start_up(
    tmp_path: Path, start: Callable[..., subprocess.Popen[str]], change: dict[str, object]
) -> None:
    assert _said(start(HOLD, str(tmp_path), "given")) == "3"
    elsewhere = replace(_claim(tmp_path), **change)  # type: ignore[arg-type]
    write_json(RunPaths(tmp_path).claim(3), elsewhere)
    check_claim(tmp_path, claim_given(tmp_path, 3, patience_s=60))
    with pytest.raises(ClaimLost):
        check_claim(tmp_path, elsewhere)


def test_a_claim_that_says_nothing_holds_nobody_up(tmp_path: Path) -> None:
    RunPaths(tmp_path).attempt_dir(3).mkdir(parents=True)
    RunPaths(tmp_path).claim(3).write_bytes(b"{")
    check_claim(tmp_path, claim_given(tmp_path, 3))


# ---------------------------------------------------------------- one Checkpointer in a process


def test_a_place_at_a_run_directory_is_free_again_once_it_is_left_or_given_up(tmp_path: Path) -> None:
    seat = take_seat(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path)
    assert f"{tmp_path / 'link'}: a Checkpointer of this process" in why_taken(tmp_path / "link")
    assert not why_taken(tmp_path / "other")
    seat.leave()
    other = take_seat(tmp_path)
    seat.leave()
    assert why_taken(tmp_path)
    del other
    assert not why_taken(tmp_path)


# ---------------------------------------------------------------- the public API

TRAIN = """
import sys
from pathlib import Path
import torch
from trainer.storage import stored

look, times = stored.next_attempt, []

def look_together(run_dir):
    found = look(run_dir)
    if not times:
        times.append(found)
        print("looked", flush=True)
        sys.stdin.readline()  # until the other has looked, too
    return found

stored.next_attempt = look_together
from trainer.checkpoint import Checkpointer
torch.set_num_threads(1)
model = torch.nn.Linear(1, 1)
with torch.no_grad():
    model.weight.fill_(float(sys.argv[2]))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
checkpointer = Checkpointer(model=model, optimizer=optimizer, run_dir=Path(sys.argv[1]))
checkpointer.step()
checkpointer.save()
result = checkpointer.wait()
checkpointer.close(saves=False)
print(result.path.name, result.is_verified, flush=True)
"""


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Checkpointer]]:
    """Build Checkpointers of a small model whose weight is `value`, all of the same run directory."""
    import torch

    from trainer.checkpoint import Checkpointer

    made: list[Checkpointer] = []

    def build(value: float = 0.0) -> Checkpointer:
        model = torch.nn.Linear(3, 3)
        with torch.no_grad():
            model.weight.fill_(value)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        made.append(Checkpointer(model=model, optimizer=optimizer, run_dir=tmp_path, every_s=1e9))
        return made[-1]

    yield build
    for checkpointer in made:
        checkpointer.close(saves=False)


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of attempt 3 of a run."""
    monkeypatch.setenv(contract.ENV_RUN, "gpt")
    monkeypatch.setenv(contract.ENV_ATTEMPT, "3")


def _weight(path: Path) -> float:
    import torch
    from torch.distributed.checkpoint.state_dict_loader import load

    state = {"model": {"weight": torch.zeros(1, 1)}}
    load(state, checkpoint_id=path)
    return float(state["model"]["weight"])


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_two_trainings_that_begin_at_once_store_both_and_mix_nothing(
    tmp_path: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    trainings = [start(TRAIN, str(tmp_path), value) for value in ("1", "2")]
    assert [_said(training) for training in trainings] == ["looked", "looked"]
    for training in trainings:
        assert training.stdin is not None
        training.stdin.write("\n")
        training.stdin.flush()
    said = [_said(training) for training in trainings]
    assert sorted(said) == ["step-1.a1 True", "step-1.a2 True"]
    assert [_weight(tmp_path / "checkpoints" / words.split()[0]) for words in said] == [1.0, 2.0]


@pytest.mark.torch
@pytest.mark.parametrize("is_supervised", [False, True])
def test_a_second_checkpointer_of_a_process_is_refused_with_what_to_do(
    tmp_path: Path, make: Callable[..., Checkpointer], monkeypatch: pytest.MonkeyPatch, is_supervised: bool
) -> None:
    if is_supervised:
        monkeypatch.setenv(contract.ENV_ATTEMPT, "3")
    first = make()
    with pytest.raises(RunDirectoryInUse, match=rf"{tmp_path}: .* give each its own run_dir"):
        make()
    first.close(saves=False)
    second = make()
    second.step()
    second.save()
    result = second.wait()
    assert result is not None
    assert result.is_verified


@pytest.mark.torch
@pytest.mark.usefixtures("service")
def test_a_training_whose_attempt_was_begun_anew_elsewhere_publishes_nothing_more(
    tmp_path: Path, make: Callable[..., Checkpointer]
) -> None:
    old = make()
    old.step()
    old.save()
    assert (first := old.wait()) is not None
    assert first.is_verified
    _take_over_from_elsewhere(tmp_path)
    theirs = RunPaths(tmp_path).checkpoint(2, 3)
    theirs.mkdir()
    (theirs / "__0_0.distcp").write_bytes(b"being written")
    old.step()
    old.save()
    result = old.wait()
    assert result is not None
    assert not result.is_complete
    assert not result.is_verified
    assert "of node7 has started it since; nothing more of it is published" in result.error
    assert (theirs / "__0_0.distcp").read_bytes() == b"being written"


@pytest.mark.torch
@pytest.mark.usefixtures("service")
def test_a_training_that_comes_again_to_a_step_of_its_own_with_another_state_does_not_call_it_saved(
    tmp_path: Path, make: Callable[..., Checkpointer]
) -> None:
    for value in (1.0, 2.0):
        checkpointer = make(value)
        checkpointer.step()
        checkpointer.save()
        result = checkpointer.wait()
        assert result is not None
        assert result.is_verified == (value == 1.0)
        assert ("with other contents" in result.error) == (value == 2.0)
        checkpointer.close(saves=False)
    assert [found.is_verified for found in find_checkpoints(tmp_path / "checkpoints")] == [True]


@pytest.mark.torch
@pytest.mark.usefixtures("service")
def test_a_training_that_leaves_right_after_it_was_resumed_has_nothing_to_save(
    tmp_path: Path, make: Callable[..., Checkpointer]
) -> None:
    first = make()
    first.step()
    first.save()
    first.wait()
    first.close(saves=False)
    second = make(5.0)
    restored = second.restore()
    assert restored is not None
    random.random()  # whatever is done before the first step
    written = restored.path.stat().st_mtime_ns
    assert second.leave()
    assert restored.path.stat().st_mtime_ns == written
    assert json.loads(RunPaths(tmp_path).outcome(3).read_bytes())["exit_code"] == contract.EXIT_RESUBMIT


def test_a_claim_tells_people_who_has_it(tmp_path: Path) -> None:
    claim = claim_next(tmp_path)
    told = json.loads((tmp_path / "attempts" / "1" / "claim.json").read_bytes())
    assert told == asdict(claim)
    assert told["pid"] == os.getpid()
