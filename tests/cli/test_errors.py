"""Every mistake gets one clear line on standard error, the documented exit code, and no traceback."""

from __future__ import annotations

import socket
import sqlite3

import pytest

from supervisor import runlock
from supervisor.cli.main import judge_error
from supervisor.control import DaemonDown, DaemonSilent, Refused
from tests.cli.conftest import NOW, Service, run


def told(service: Service, *words: str, code: int) -> str:
    """The one line that a failing command says."""
    result = service.call(*words)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("supervisor: ")
    assert result.stdout == ""
    return result.stderr


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("explode", "No such command 'explode'"),
        ("status --sideways", "No such option '--sideways'"),
        ("stop", "Missing argument 'RUN'"),
        ("plan --gpus 512", "Missing options '--save-s', '--restart-s'."),
        ("plan --gpus 512 --save-s 1", "Missing option '--restart-s'"),
        ("plan --gpus many --save-s 1 --restart-s 1", "'many' is not a valid integer"),
        ("plan --gpus 0 --save-s 1 --restart-s 1", "--gpus must be at least 1"),
        ("plan --gpus 8 --save-s -1 --restart-s 1", "--save-s must be above 0"),
        ("plan --gpus 8 --save-s 1 --restart-s nan", "--restart-s must be at least 0"),
        ("history --since yesterday", "is no span"),
        ("status --config /does/not/exist.toml", "/does/not/exist.toml: no such file"),
        ("submit /does/not/exist.toml", "/does/not/exist.toml: no such file"),
        ("daemon --log-level loud", "'loud' is not one of"),
    ],
)
def test_a_wrong_command_line_is_told_with_exit_code_2(service: Service, words: str, part: str) -> None:
    assert part in told(service, *words.split(), code=2)


@pytest.mark.parametrize(
    ("old", "new", "part"),
    [
        ("min = 1", "min = 3", "min (3) is more than max (2)"),
        ("max = 2", "maximum = 2", 'has no key "maximum"; did you mean "max"?'),
        ("train.py", "gone.py", "gone.py not found"),
        ('name = "llama"', 'name = "../llama"', "letters, digits, dot, dash and underscore"),
        ("[nodes]", "[nodes", "not valid TOML"),
        ("[nodes]", "[slurm]\noptions = ['--requeue']\n[nodes]", "the supervisor resubmits"),
    ],
)
def test_a_wrong_run_file_is_told_with_exit_code_2(service: Service, old: str, new: str, part: str) -> None:
    path = service.write_run_file(lambda text: text.replace(old, new))
    assert part in told(service, "submit", path, code=2)


@pytest.mark.parametrize("words", ["stop llama", "pause", "pause llama", "resume", "release llama"])
def test_without_a_daemon_a_change_says_how_to_start_it(service: Service, words: str) -> None:
    assert "systemctl start supervisor" in told(service, *words.split(), code=3)


def test_with_a_configuration_of_ones_own_the_hint_names_it(service: Service) -> None:
    config = service.folder / "my.toml"
    config.write_text("")
    assert f"supervisor daemon --config {config}`" in told(service, "pause", "--config", str(config), code=3)
    assert f"supervisor daemon --config {config}`" in told(
        service, "submit", service.write_run_file(), "--config", str(config), code=3
    )


def test_without_a_daemon_nothing_is_submitted_and_nothing_left_behind(service: Service) -> None:
    path = service.write_run_file()
    assert "systemctl start supervisor" in told(service, "submit", path, code=3)
    assert list(service.runs.iterdir()) == []


@pytest.mark.parametrize("words", ["status", "status --json", "history", "history --json"])
def test_where_no_daemon_has_ever_run_reading_says_so(service: Service, words: str) -> None:
    assert "start the daemon" in told(service, *words.split(), code=3)


def test_a_ledger_of_a_newer_version_is_refused(service: Service) -> None:
    service.keep()
    with sqlite3.connect(service.ledger) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    assert "version 99" in told(service, "status", code=2)
    assert "version 99" in told(service, "daemon", code=2)


def test_a_ledger_that_is_no_database_is_told(service: Service) -> None:
    service.ledger.parent.mkdir()
    service.ledger.write_bytes(b"not a database, whatever else it may be" * 100)
    assert "is damaged" in told(service, "status", code=1)


def test_a_name_in_use_is_refused_and_the_run_directory_of_the_other_stays(service: Service) -> None:
    service.keep(run())
    with service.running():
        assert "is in use" in told(service, "submit", service.write_run_file(), code=2)
    assert list(service.runs.iterdir()) == []


@pytest.mark.parametrize("verb", ["stop", "pause", "resume", "release"])
def test_a_run_that_is_not_there_is_told(service: Service, verb: str) -> None:
    with service.running():
        assert 'no run "other"' in told(service, verb, "other", code=2)


@pytest.mark.parametrize("words", ["status other", "history other"])
def test_reading_of_a_run_that_is_not_there_is_told(service: Service, words: str) -> None:
    service.keep(run())
    assert 'no run "other"' in told(service, *words.split(), code=2)


def test_what_makes_no_sense_now_is_refused_with_exit_code_4(service: Service) -> None:
    service.keep(run())
    with service.running():
        assert "only a held or a stopped run" in told(service, "release", "llama", code=4)


def test_a_right_that_is_missing_is_exit_code_4() -> None:
    assert judge_error(Refused("not_allowed", "uid 1 may not"))[0] == 4


def test_a_frozen_daemon_is_told_and_is_no_traceback(service: Service) -> None:
    service.keep(run())
    with socket.socket(socket.AF_UNIX) as frozen:
        frozen.bind(str(service.socket))
        frozen.listen(5)
        result = service.call("status")
    assert result.exit_code == 0
    assert "NOT ANSWERING" in result.stdout


def test_a_defect_is_one_line_too_and_debug_shows_where(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("two\nlines")

    monkeypatch.setattr("supervisor.cli.plan.plan_saves", broken)
    words = ["plan", "--gpus", "1", "--save-s", "1", "--restart-s", "1"]
    assert "RuntimeError: two lines" in told(service, *words, code=70)
    with_debug = service.call("--debug", *words)
    assert with_debug.exit_code == 70
    assert "Traceback" in with_debug.stderr


def test_debug_keeps_the_exit_code(service: Service) -> None:
    assert service.call("--debug", "status").exit_code == 3
    assert service.call("--debug", "plan").exit_code == 2


def test_what_may_have_been_accepted_is_not_told_as_a_daemon_that_is_not_running() -> None:
    assert judge_error(DaemonSilent("no answer"))[0] == 5
    assert judge_error(DaemonDown("not there"))[0] == 3
    assert judge_error(Refused("internal", "a defect of the service"))[0] == 70


@pytest.mark.parametrize("words", ["daemon", "doctor"])
def test_a_slurm_configuration_that_is_not_there_is_told(service: Service, words: str) -> None:
    config = service.folder / "my.toml"
    config.write_text('[slurm]\nconf = "/does/not/exist/slurm.conf"\n')
    assert "/does/not/exist/slurm.conf: no such file" in told(service, words, "--config", str(config), code=2)


def test_a_node_that_nobody_knows_is_told_with_where_to_look(service: Service) -> None:
    service.keep(run())
    assert 'no node "n9"; `supervisor nodes` lists them' in told(service, "nodes", "n9", code=2)


def test_a_second_daemon_is_refused(service: Service) -> None:
    service.keep()
    with runlock.acquire(service.ledger, NOW):
        assert "already runs" in told(service, "daemon", "--once", code=2)
