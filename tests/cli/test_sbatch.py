"""`supervisor sbatch` and `supervisor adopt` before anything is submitted: what is read, refused, and said."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from slurm.submitted import read_submitted
from slurm.types import JobDescription, JobState
from supervisor.accounts import user_name
from supervisor.cli.adopt import choose_arguments
from supervisor.cli.main import EXIT_BAD_INPUT, CommandError, main
from supervisor.cli.sbatch import as_utf8, look_around, read_handed_in, request_of, submit
from supervisor.config import load_settings
from supervisor.model import RunState
from supervisor.scripts import read_script
from supervisor.store import Store
from tests.cli.conftest import Service, now, run

SCRIPT = "#!/bin/sh\n#SBATCH -J train\necho\n"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a script, which the commands run in."""
    folder = tmp_path / "home"
    folder.mkdir()
    (folder / "train.sh").write_text(SCRIPT)
    monkeypatch.chdir(folder)
    return folder


def sbatch(service: Service, *words: str, script: str | None = None) -> Result:
    env = {"SUPERVISOR_LEDGER": str(service.ledger), "SUPERVISOR_SOCKET": str(service.socket), "API_KEY": "hunter2"}
    return CliRunner().invoke(main, ["sbatch", *words], env=env, input=script)


def test_help_is_ours_and_names_every_supervision_option(service: Service) -> None:
    for word in ("--help", "-h"):
        shown = sbatch(service, "-N", "2", word)
        assert shown.exit_code == 0
        assert "--supervise-min-nodes=N" in shown.output
    assert "--help" not in sbatch(service, "--supervise-dry-run", "train.sh", "--help").output.partition("sbatch ")[0]


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["nothere.sh"], 1, "sbatch: error: Unable to open file nothere.sh\n"),
        (["/"], 1, "sbatch: error: Unable to open file /\n"),
        (["--bogus", "train.sh"], 255, "sbatch: unrecognized option '--bogus'"),
        (["-N4-2", "train.sh"], 255, "Maximum node count 2 is less than minimum node count 4"),
        (["--wrap=x", "train.sh"], 1, "Script arguments not permitted with --wrap option"),
        (["--array=1", "train.sh"], 2, "supervisor: job arrays are not supervised"),
        (["--supervise-nmae=x", "train.sh"], 2, "did you mean --supervise-name?"),
        (["--supervise-checkpoint-dir=train.sh", "train.sh"], 2, "Not a directory"),
    ],
)
def test_bad_input_is_told_as_sbatch_tells_it_or_with_the_reason(
    service: Service, words: list[str], code: int, says: str
) -> None:
    ended = sbatch(service, *words)
    assert (ended.exit_code, says in ended.stderr, ended.stdout) == (code, True, "")


@pytest.mark.parametrize(
    ("text", "code", "says"),
    [
        (b"echo\n", 1, "This does not look like a batch script."),
        (b"#!/bin/sh\r\necho\r\n", 1, "DOS line breaks"),
        (b"", 1, "Batch script is empty!"),
        (b"#!/bin/sh\n\0", 1, "NULL character"),
        (b"#!/bin/sh\n" + b"#" * 600_000, 2, "larger than 512 KiB"),
        (b"#!/bin/sh\n#SUPERVISE --min-nodes=few\n", 2, "a whole number is needed"),
    ],
)
def test_a_script_that_is_none_is_refused(service: Service, home: Path, text: bytes, code: int, says: str) -> None:
    (home / "bad.sh").write_bytes(text)
    ended = sbatch(service, "bad.sh")
    assert (ended.exit_code, says in ended.stderr) == (code, True)
    assert sbatch(service, script=text.decode()).exit_code == code


def test_a_script_that_is_not_here_is_looked_for_on_the_path(
    service: Service, home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "bin").mkdir()
    (home / "train.sh").rename(tmp_path / "bin/onpath.sh")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    assert sbatch(service, "--supervise-dry-run", "onpath.sh").exit_code == 0


def test_without_a_daemon_nothing_is_left_and_the_way_on_is_said(service: Service, home: Path) -> None:
    ended = sbatch(service, "train.sh")
    assert (ended.exit_code, ended.stdout) == (3, "")
    assert "Nothing was submitted; plain sbatch would run it unsupervised" in ended.stderr
    assert not (home / ".supervisor").exists()


def test_a_folder_that_cannot_hold_runs_is_refused(service: Service, home: Path) -> None:
    (home / ".supervisor").write_text("")
    ended = sbatch(service, "train.sh")
    assert (ended.exit_code, "--supervise-root=DIR" in ended.stderr) == (2, True)


def test_a_dry_run_says_what_would_be_submitted_and_leaves_nothing(service: Service, home: Path) -> None:
    with service.running():
        service.keep()
        ended = sbatch(service, "-N2", "--mem=0", "--supervise-dry-run", "--supervise-json", "train.sh", "a b")
        plain = sbatch(service, "--supervise-dry-run", "train.sh")
    report = json.loads(ended.stdout)
    assert (report["run"], report["argv"][-2:]) == ("train", [str(home / "train.sh"), "a b"])
    assert {"--mem=0", "--nodes=2", "--dependency=singleton"} <= set(report["argv"])
    assert "hunter2" not in ended.output
    assert "would make" in plain.stdout
    assert not (home / ".supervisor").exists()
    assert not list((service.ledger.parent / "submissions").glob("*"))
    assert "daemon is not running" in sbatch(service, "--supervise-dry-run", "train.sh").stderr


def test_a_dry_run_shows_the_supervision_that_applies_and_every_note(service: Service, home: Path) -> None:
    """What is given and what is by default; a `#SUPERVISE` line behind the first command is said not to be read."""
    (home / "own.sh").write_text("#!/bin/sh\n#SUPERVISE --layout=dcp\necho\n#SUPERVISE --max-restarts=9\n")
    words = ("-N2", "--supervise-checkpoint-dir=ckpt", "--output=nowhere/%j.out", "--supervise-dry-run")
    with service.running():
        report = json.loads(sbatch(service, *words, "--supervise-json", "own.sh").stdout)
        shown = sbatch(service, *words, "own.sh")
    applies = report["supervision"]
    assert (applies["min-nodes"], applies["max-nodes"], applies["layout"]) == (2, 2, "dcp")
    assert (applies["checkpoint-dir"], applies["max-restarts"]) == (str(home / "ckpt"), 3)
    said = " ".join(report["notes"])
    assert "nowhere: no such folder" in said
    assert "ckpt: not there yet" in said
    assert "line 4 of the script: #SUPERVISE" in said
    assert f"checkpoint-dir     {home}/ckpt" in shown.stdout


def test_the_hint_for_a_daemon_that_is_down_names_the_chosen_configuration(service: Service, home: Path) -> None:
    config = home / "own.toml"
    config.write_text("")
    ended = sbatch(service, f"--supervise-config={config}", "train.sh")
    assert (ended.exit_code, f"supervisor daemon --config {config}" in ended.stderr) == (3, True)


def test_what_sbatch_does_not_say_of_the_surroundings_is_said(home: Path) -> None:
    """A log that can't be opened ends a job without a word; what is submitted inside a run's job is another run."""
    (home / "logs").mkdir()
    there = read_script(read_handed_in(("--output=logs/%j.out", "--error=%x/%j.err", "train.sh")))
    assert look_around(there, {"SUPERVISOR_RUN": "llama"}) == ()
    missing = read_script(read_handed_in(("--output=logs/%j.out", "--error=nowhere/%j.err", "train.sh")))
    folder, outer = look_around(missing, {"SUPERVISOR_RUN": "llama", "SLURM_JOB_ID": "12"})
    assert folder.startswith(f"{home}/nowhere: no such folder here")
    assert "inside a job of run llama" in outer


@pytest.mark.parametrize("encoding", ["utf-8", "iso8859-1", "ascii"])
@pytest.mark.parametrize("data", ["träin".encode(), b"caf\xe9"])
def test_what_is_handed_in_keeps_its_bytes_in_every_locale(encoding: str, data: bytes) -> None:
    text = as_utf8(data.decode(encoding, "surrogateescape"), encoding)
    assert text == data.decode("utf-8", "surrogateescape")


def test_a_working_directory_that_is_gone_is_refused_as_by_sbatch(service: Service, home: Path) -> None:
    (home / "train.sh").rename(home.parent / "train.sh")
    home.rmdir()
    ended = sbatch(service, str(home.parent / "train.sh"))
    assert (ended.exit_code, ended.stderr) == (255, "sbatch: error: getcwd failed: No such file or directory\n")


def test_a_run_that_has_no_job_yet_is_told_with_its_reason(
    service: Service, capsys: pytest.CaptureFixture[str]
) -> None:
    handed = read_handed_in(("train.sh",))
    settings = load_settings(None, {"SUPERVISOR_LEDGER": str(service.ledger), "SUPERVISOR_SOCKET": str(service.socket)})
    with service.running():
        code = submit(settings, request_of("sbatch", handed), read_script(handed), wait_s=0.3)
    shown = capsys.readouterr()
    assert (code, shown.out) == (5, "")
    assert f"accepted as run train, which has no job yet (submitted by {user_name(os.geteuid())})" in shown.err
    kept = service.load_run("train")
    assert kept is not None
    assert kept.state is RunState.ACTIVE


def test_a_stopped_run_makes_room_for_a_script_only_when_sbatch_had_refused_it(service: Service) -> None:
    refused = run("train", state=RunState.STOPPED, reason="stopped by ann")
    with service.running(), Store.open(service.ledger, now=now()) as store:
        store.add_run(refused, now())
        ended = sbatch(service, "--supervise-name=train", "train.sh")
    assert (ended.exit_code, "choose another" in ended.stderr) == (2, True)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "one job id is needed"),
        (["1", "2"], "one job id is needed"),
        (["12_3"], "only whole jobs"),
        (["12+1"], "only whole jobs"),
        (["12.batch"], "only whole jobs"),
        (["twelve"], "is not a job id"),
        (["0"], "is not a job id"),
        (["5", "--supervise-nmae=x"], "did you mean"),
        (["--", "5"], "one job id is needed"),
    ],
)
def test_what_is_no_job_is_not_adopted(service: Service, words: list[str], says: str) -> None:
    ended = service.call("adopt", *words)
    assert (ended.exit_code, says in ended.stderr) == (2, True)


def job_as(command: str) -> JobDescription:
    return JobDescription(
        job_id=7, name="t", user="ann", uid=1, state=JobState.RUNNING, raw_state="RUNNING", command=command
    )


@pytest.mark.parametrize(
    ("command", "release", "given", "result"),
    [
        ("/t", (22, 5), None, ()),
        ("/t a", (22, 5), None, ("a",)),
        ("/t a b", (22, 5), None, "-- a b` if each of them does; quote what belongs together, e.g. -- 'a b'"),
        ("/t a b c", (22, 5), None, "quote what belongs together, e.g. -- a 'b c'"),
        ("/t a b", (22, 5), ("a b",), ("a b",)),
        ("/t", (24, 11), None, "`supervisor adopt 7 --` if it has none"),
        ("/t", (24, 11), (), ()),
        ("", (24, 11), None, ()),
        ("", (24, 11), ("a",), "takes no arguments"),
    ],
)
def test_the_arguments_of_an_adopted_job_are_not_guessed(
    command: str, release: tuple[int, int], given: tuple[str, ...] | None, result: tuple[str, ...] | str
) -> None:
    job = job_as(command)
    if isinstance(result, tuple):
        assert choose_arguments(job, read_submitted(job, release=release), given) == result
        return
    with pytest.raises(CommandError, match=re.escape(result)) as refused:
        choose_arguments(job, read_submitted(job, release=release), given)
    assert refused.value.exit_code == EXIT_BAD_INPUT
