"""One save from begin to verified, through real writers: what is stored, when it counts, and what a failure does."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.trainer.saving.waiting import await_that
from trainer.contract import MANIFEST_NAME
from trainer.format.manifest import parse_manifest
from trainer.storage.stored import find_checkpoints, verify_checkpoint

if TYPE_CHECKING:
    import torch

    from tests.trainer.saving.crew import Crew

pytestmark = pytest.mark.torch

MODES = ["copy", "auto"]


def _values(rank: int, count: int = 3) -> list[torch.Tensor | bytes]:
    import torch

    large: list[torch.Tensor | bytes] = [torch.full((700_001,), rank * 10.0 + at) for at in range(count)]
    return [*large, torch.tensor(rank), b"opaque"]


@contextmanager
def _crew(root: Path, world: int = 2, **options: object) -> Iterator[Crew]:
    from tests.trainer.saving.crew import crew

    with crew(root, [_values(rank) for rank in range(world)], **options) as made:
        yield made


def _step(crew: Crew, step: int, attempt: int = 1) -> Path:
    return crew.root / "checkpoints" / f"step-{step}.a{attempt}"


@pytest.mark.parametrize("staging", MODES)
def test_what_is_stored_is_what_was_there_when_the_save_began(tmp_path: Path, staging: str) -> None:
    with _crew(tmp_path, staging=staging) as crew:
        for step in (1, 2):
            before = crew.snapshot()
            crew.begin(step)
            for own in crew.values:
                for value in own:
                    if not isinstance(value, bytes):
                        value.add_(1)  # at once: what is not copied yet waits or was copied
            assert all(result.is_verified for result in crew.results())
            assert crew.stored(step) == before


@pytest.mark.parametrize("staging", MODES)
def test_a_training_that_writes_all_the_time_leaks_nothing(tmp_path: Path, staging: str) -> None:
    import torch

    with _crew(tmp_path, world=1, staging=staging) as crew:
        (own,) = crew.values
        tensors = [value for value in own if isinstance(value, torch.Tensor)]
        for step in range(1, 6):
            before = crew.snapshot()
            crew.begin(step)
            while crew.savers[0].is_busy:
                for tensor in tensors:
                    tensor.add_(1)
            assert crew.results()[0].is_verified
            assert crew.stored(step) == before


def test_tied_weights_are_stored_twice_and_alike(tmp_path: Path) -> None:
    import torch

    from tests.trainer.saving.crew import crew

    tied = torch.arange(300_000, dtype=torch.float32)
    with crew(tmp_path, [[tied, torch.zeros(3), tied]]) as one:
        before = one.snapshot()
        one.begin(1)
        tied.zero_()
        assert one.results()[0].is_verified
        assert one.stored(1) == before


def test_a_verified_save_names_what_wrote_it(tmp_path: Path) -> None:
    with _crew(tmp_path) as crew:
        (result, _) = crew.save(7)
        manifest = parse_manifest((result.path / MANIFEST_NAME).read_bytes(), needs_seal=True)
        assert (manifest.run, manifest.attempt, manifest.step, manifest.world_size) == ("gpt", 1, 7, 2)
        assert [file.path for file in manifest.files] == [".metadata", "__0_0.distcp", "__1_0.distcp"]
        assert {"python", "torch"} <= set(manifest.libraries)
        assert verify_checkpoint(result.path) == manifest
        assert (tmp_path / "checkpoints" / "latest").readlink() == Path("step-7.a1")


def test_an_image_without_bytes_makes_no_file(tmp_path: Path) -> None:
    from tests.trainer.saving.crew import crew

    with crew(tmp_path, [_values(0), []]) as two:
        assert all(result.is_verified for result in two.save(1))
        assert not (_step(two, 1) / "__1_0.distcp").exists()


def test_a_save_in_flight_is_not_overtaken(tmp_path: Path) -> None:
    from trainer.saving.saver import SaveInFlight

    with _crew(tmp_path) as crew:
        crew.begin(1, ranks=[0])
        assert crew.savers[0].is_busy
        with pytest.raises(SaveInFlight):
            crew.begin(2, ranks=[0])
        crew.begin(1, ranks=[1])
        assert [result.step for result in crew.results()] == [1, 1]


def test_without_write_protection_everything_is_copied_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise PermissionError

    monkeypatch.setattr("trainer.saving.process.open_descriptor", refuse)
    with _crew(tmp_path, staging="auto") as crew:
        assert not crew.savers[0].is_protecting
        before = crew.snapshot()
        assert all(result.is_verified for result in crew.save(1))
        assert crew.stored(1) == before
    with pytest.raises(RuntimeError, match="write protection"), _crew(tmp_path, world=1, staging="protect"):
        pass


def test_only_what_can_not_be_protected_is_copied_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    import torch

    from tests.trainer.saving.crew import crew
    from trainer.saving.protect import Protector, Region, open_descriptor

    size = 4 * 2**20
    memory = mmap.mmap(-1, 3 * size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    taken = torch.frombuffer(memory, dtype=torch.float32, count=size // 4, offset=size).fill_(1)
    with crew(tmp_path, [[torch.ones(700_001), taken, taken]]) as one:
        if not one.savers[0].is_protecting:
            pytest.skip("no write protection here")
        other = open_descriptor().fd
        Protector(other, os.getpid()).register([Region(taken.data_ptr(), size)])
        for step in (1, 2):
            before = one.snapshot()
            one.begin(step)
            for value in one.values[0][:2]:
                assert isinstance(value, torch.Tensor)
                value.add_(1)
            assert one.results()[0].is_verified
            assert one.stored(step) == before
        os.close(other)
    (said,) = [record.getMessage() for record in caplog.records if "protected" in record.getMessage()]
    assert said.startswith("4.0 MiB of the state")


def _is_write_protected(address: int) -> bool:
    page = os.sysconf("SC_PAGE_SIZE")
    with Path("/proc/self/pagemap").open("rb") as pages:
        pages.seek(address // page * 8)
        return bool(int.from_bytes(pages.read(8), "little") >> 57 & 1)


def test_what_keeps_a_training_from_going_on_once_does_not_in_the_next_save(tmp_path: Path) -> None:
    import torch

    from tests.trainer.saving.crew import crew

    size = 2**20
    memory = mmap.mmap(-1, 3 * size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory[:] = b"a" * len(memory)
    first = torch.frombuffer(memory, dtype=torch.uint8, count=size)
    second = torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=size + 8192)
    between = first.data_ptr() + size + 4096  # where others of this process keep something
    with crew(tmp_path, [[first, second]]) as one:
        saver, plan = one.savers[0], one.plans[0]
        if not saver.is_protecting:
            pytest.skip("no write protection here")
        was_protected: list[bool] = []

        def write() -> None:
            """Write between the tensors while they are protected, if that is seen in time."""
            stop = time.monotonic() + 0.05
            while not _is_write_protected(second.data_ptr() + size // 2):
                if time.monotonic() > stop:
                    return
            seen = _is_write_protected(between)
            if _is_write_protected(first.data_ptr() + size - 4096):  # its neighbour, which is copied no later
                was_protected.append(seen)
                memory[size + 4096] = 1

        for step in range(1, 31):
            saver.begin(plan, one.values[0], step=step, samples=step, meanwhile=write)
            assert one.results()[0].is_verified
            if False in was_protected:
                break
        assert was_protected[:1] == [True]
        assert was_protected[-1] is False
        assert one.stored(step) == one.snapshot()


def test_tensors_that_moved_are_found_where_they_are_now(tmp_path: Path) -> None:
    with _crew(tmp_path) as crew:
        crew.save(1)
        crew.values = [[v if isinstance(v, bytes) else v.clone() + 1 for v in own] for own in crew.values]
        before = crew.snapshot()
        assert all(result.is_verified for result in crew.save(2))
        assert crew.stored(2) == before


def test_another_structure_gets_memory_of_its_own(tmp_path: Path) -> None:
    from tests.trainer.saving.crew import plan_by_hand

    with _crew(tmp_path) as crew:
        crew.save(1)
        crew.values = [_values(rank, count=5) for rank in range(2)]
        crew.plans = [plan_by_hand(rank, own) for rank, own in enumerate(crew.values)]
        before = crew.snapshot()
        assert all(result.is_verified for result in crew.save(2))
        assert crew.stored(2) == before


def test_a_step_is_saved_once_and_only_the_same_bytes_count_as_saved_again(tmp_path: Path) -> None:
    with _crew(tmp_path) as crew:
        crew.save(1)
        before = crew.stored(1)
        written = _step(crew, 1).stat().st_mtime_ns
        assert all(result.is_verified for result in crew.save(1))
        for value in crew.values[1]:
            if not isinstance(value, bytes):
                value.add_(1)
        for result in crew.save(1):
            assert not result.is_complete
            assert not result.is_verified
            assert "verified the step already, with other contents" in result.error
        assert crew.stored(1) == before
        assert _step(crew, 1).stat().st_mtime_ns == written
        assert all(result.is_verified for result in crew.save(2))
        assert crew.stored(2) != before


def test_a_leftover_of_this_attempt_makes_room(tmp_path: Path) -> None:
    leftover = tmp_path / "checkpoints" / "step-1.a1"
    leftover.mkdir(parents=True)
    (leftover / "__7_0.distcp").write_bytes(b"left")
    with _crew(tmp_path) as crew:
        assert all(result.is_verified for result in crew.save(1))
        assert not (leftover / "__7_0.distcp").exists()


def test_only_verified_checkpoints_push_older_ones_out(tmp_path: Path) -> None:
    with _crew(tmp_path, keep_last=2) as crew:
        for step in (1, 2, 3):
            crew.save(step)
        assert [found.step for found in find_checkpoints(tmp_path / "checkpoints")] == [2, 3]


def test_what_the_training_resumed_from_is_kept(tmp_path: Path) -> None:
    with _crew(tmp_path, keep_last=2) as crew:
        crew.save(1)
        crew.savers[0].keep([_step(crew, 1)])
        for step in (2, 3, 4):
            crew.save(step)
        assert [found.step for found in find_checkpoints(tmp_path / "checkpoints")] == [1, 3, 4]


# ---------------------------------------------------------------- failures


def test_sources_of_one_rank_that_do_not_fit_fail_the_save_of_all_and_the_next_one_works(tmp_path: Path) -> None:
    with _crew(tmp_path) as crew:
        crew.save(1)
        right, crew.values[1] = crew.values[1], crew.values[1][:-1]
        errors = [result.error for result in crew.save(2)]
        assert all(error.startswith("rank 1: ValueError") for error in errors), errors
        crew.values[1] = right
        assert all(result.is_verified for result in crew.save(3))


def test_a_folder_that_can_not_be_made_fails_the_save_with_its_path(tmp_path: Path) -> None:
    with _crew(tmp_path) as crew:
        (tmp_path / "checkpoints").write_text("a file")
        errors = [result.error for result in crew.save(1)]
        assert all(str(tmp_path / "checkpoints") in error for error in errors), errors
        (tmp_path / "checkpoints").unlink()
        assert all(result.is_verified for result in crew.save(2))


def test_a_failed_write_names_rank_and_path_and_removes_its_folder_alone(tmp_path: Path) -> None:
    with _crew(tmp_path) as crew:
        crew.save(1)
        _limit_file_size(crew, rank=1, size=1_000_000)
        errors = [result.error for result in crew.save(2)]
        assert all(error.startswith("rank 1: ") for error in errors), errors
        assert all("__1_0.distcp: File too large" in error for error in errors), errors
        await_that(lambda: not _step(crew, 2).exists())
        assert [found.step for found in find_checkpoints(tmp_path / "checkpoints") if found.is_verified] == [1]
        _limit_file_size(crew, rank=1, size=-1)
        assert all(result.is_verified for result in crew.save(3))


def _limit_file_size(crew: Crew, rank: int, size: int) -> None:
    import resource

    pid = crew.savers[rank].writer_pid
    assert pid is not None
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def test_after_closing_no_save_is_begun_and_nothing_is_waited_for(tmp_path: Path) -> None:
    with _crew(tmp_path, world=1) as crew:
        crew.save(1)
        crew.savers[0].close()
        with pytest.raises(RuntimeError, match="close"):
            crew.begin(2)
        with pytest.raises(RuntimeError, match="close"):
            crew.savers[0].prepare(crew.plans[0], crew.values[0])
        assert crew.savers[0].wait() is None
        assert crew.savers[0].writer_pid is None


def test_closing_gives_up_the_save_in_flight_and_ends_the_writer(tmp_path: Path) -> None:
    with _crew(tmp_path) as crew:
        crew.begin(1, ranks=[0])
        pid = crew.savers[0].writer_pid
        crew.savers[0].close()
        assert pid is not None
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
