"""Commands that change something: what they ask of the daemon, and what stays when they fail."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from supervisor.config import parse_run_file
from supervisor.model import RunState
from tests.cli.conftest import Service, run


@pytest.fixture
def without_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    """No Slurm commands are found: submission goes on and says what it could not check."""
    monkeypatch.setenv("PATH", "/nowhere")


@pytest.mark.usefixtures("without_slurm")
def test_a_submitted_run_has_its_directory_and_its_row(service: Service) -> None:
    with service.running():
        result = service.call("submit", service.write_run_file(), "--json")
    assert result.exit_code == 0, result.output
    reply = json.loads(result.stdout)
    assert (reply["ok"], reply["run"], reply["state"]) == (True, "llama", "active")
    assert any("not checked" in note for note in reply["notes"])
    kept = service.load_run()
    assert kept is not None
    path = service.folder / "runs/llama/run.toml"
    assert parse_run_file(path.read_text(), path=path) == kept.spec
    assert kept.spec.workdir == service.folder


@pytest.mark.usefixtures("without_slurm")
def test_a_dry_run_of_submit_makes_nothing(service: Service) -> None:
    with service.running():
        result = service.call("submit", service.write_run_file(), "--dry-run")
    assert result.exit_code == 0
    assert "dry run" in result.stdout
    assert service.load_run() is None
    assert list(service.runs.iterdir()) == []


@pytest.mark.usefixtures("without_slurm")
def test_a_dry_run_of_submit_needs_no_daemon(service: Service) -> None:
    result = service.call("submit", service.write_run_file(), "--dry-run")
    assert result.exit_code == 0
    assert "name and rights not checked" in result.stdout


@pytest.mark.usefixtures("without_slurm")
def test_a_run_directory_with_something_in_it_is_refused_and_stays(service: Service) -> None:
    precious = service.folder / "runs/llama/precious"
    path = service.write_run_file()
    precious.parent.mkdir()
    precious.touch()
    with service.running():
        result = service.call("submit", path)
    assert result.exit_code == 2
    assert "not empty" in result.stderr
    assert precious.exists()
    assert service.load_run() is None


@pytest.mark.usefixtures("without_slurm")
def test_an_empty_run_directory_is_taken_and_given_back_on_failure(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = service.folder / "runs/llama"
    path = service.write_run_file()
    folder.mkdir()

    def refuse(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("supervisor.cli.submit._check_visible", refuse)
    with service.running():
        result = service.call("submit", path)
    assert result.exit_code == 130
    assert list(folder.iterdir()) == []


@pytest.mark.usefixtures("without_slurm")
@pytest.mark.parametrize(("root", "part"), [("gone", "create it on a file system"), ("train.py", "not a directory")])
def test_a_root_that_is_no_folder_is_refused_and_not_made(service: Service, root: str, part: str) -> None:
    path = service.write_run_file(lambda text: text.replace('"runs"', f'"{root}"'))
    with service.running():
        for words in (["submit", path], ["submit", path, "--dry-run"]):
            result = service.call(*words)
            assert result.exit_code == 2
            assert part in result.stderr
    assert not (service.folder / "gone").exists()


@pytest.mark.usefixtures("without_slurm")
def test_a_dry_run_of_a_used_name_gives_the_same_reason(service: Service) -> None:
    path = service.write_run_file()
    with service.running():
        assert service.call("submit", path).exit_code == 0
        said = [service.call("submit", path, *more) for more in ([], ["--dry-run"])]
    assert said[0].stderr == said[1].stderr
    assert "choose another" in said[0].stderr


@pytest.mark.parametrize(
    ("words", "before", "after"),
    [
        ("stop llama", RunState.ACTIVE, RunState.STOPPING),
        ("release llama", RunState.HELD, RunState.ACTIVE),
        ("stop llama --dry-run", RunState.ACTIVE, RunState.ACTIVE),
    ],
)
def test_a_change_is_in_the_ledger_when_the_command_returns(
    service: Service, words: str, before: RunState, after: RunState
) -> None:
    service.keep(run(state=before))
    with service.running():
        assert service.call(*words.split()).exit_code == 0
    kept = service.load_run()
    assert kept is not None
    assert kept.state is after


def test_a_run_and_the_service_are_paused_and_resumed(service: Service) -> None:
    service.keep(run())
    shown = []
    with service.running():
        for words in (["pause", "llama"], ["resume", "llama"], ["pause"], ["resume"]):
            assert service.call(*words).exit_code == 0
            report = json.loads(service.call("status", "--json").stdout)
            shown.append((report["runs"][0]["paused"], report["daemon"]["paused"]))
    assert shown == [(True, False), (False, False), (False, True), (False, False)]


def test_an_answer_can_be_had_as_json(service: Service) -> None:
    service.keep(run())
    with service.running():
        reply = json.loads(service.call("stop", "llama", "--json").stdout)
    assert (reply["ok"], reply["state"]) == (True, "stopping")


def test_a_second_submission_by_path_through_a_link_is_the_same_name(service: Service, tmp_path: Path) -> None:
    service.keep(run())
    path = Path(service.write_run_file())
    link = tmp_path / "link.toml"
    link.symlink_to(path)
    with service.running():
        assert service.call("submit", str(link)).exit_code == 2
