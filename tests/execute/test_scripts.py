"""A person's own batch script as a run: what is handed in, what it becomes, each of its submissions. Pure."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm import commands
from slurm.sbatch_line import BadSubmission
from slurm.sbatch_options import OPTIONS
from slurm.submitted import read_submitted
from slurm.types import Identity, JobDescription, JobState, SubmitRequest
from supervisor.joblog import find_log, find_shared_log
from supervisor.model import EPOCH, Attempt, AttemptEnd, AttemptState, Run, RunState
from supervisor.scripts import (
    Handed,
    NotSupervised,
    Script,
    choose_name,
    describe_resubmission,
    is_first_submission,
    name_run,
    read_handed,
    read_script,
    render_submission,
    settle_names,
)
from supervisor.supervision import OPTIONS as SUPERVISION
from trainer.contract import is_run_name

TEXT = "#!/bin/bash\n#SBATCH --job-name=train\necho hello\n"


def handed(*words: str, text: str = TEXT, environment: dict[str, str] | None = None, **changes: Any) -> Handed:
    one = Handed(
        text=text,
        path="train.sh",
        words=words or ("train.sh",),
        environment=environment or {"PATH": "/bin"},
        cwd="/home/ann",
    )
    return replace(one, **changes)


def read(*words: str, **changes: Any) -> Script:
    return read_script(handed(*words, **changes))


def submission(script: Script, number: int = 1, *, is_first: bool = True, **changes: Any) -> SubmitRequest:
    run = Run(spec=script.spec, script=script.script)
    attempt = Attempt(run=run.name, number=number, token=f"sup:{run.name}:{number}", nodes_wanted=2, planned_at=EPOCH)
    return render_submission(
        run,
        replace(attempt, **changes),
        batch=Path("/var/lib/supervisor/batch/train.1.sh"),
        environment=script.environment,
        identity=(1001, 1002),
        is_first=is_first,
    )


# ---------------------------------------------------------------- reading


def test_a_script_with_arguments_becomes_a_run_named_as_its_job() -> None:
    script = read("-N", "2", "--time=10", "train.sh", "a b", "-N9")
    assert (script.spec.name, script.spec.nodes.min, script.spec.nodes.max) == ("train", 2, 2)
    assert script.spec.command == ()
    assert script.spec.run_dir == Path("/home/ann/.supervisor/train")
    assert (script.script.arguments, script.script.job_name) == (("a b", "-N9"), "train")
    assert script.script.output == "/home/ann/slurm-%j.out"
    assert (script.spec.slurm.time_limit, script.script.nodes_given) == ("10", True)


@pytest.mark.parametrize(
    ("words", "text", "nodes"),
    [
        (["train.sh"], TEXT, (1, 1)),
        (["-N2-4", "train.sh"], TEXT, (2, 4)),
        (["-N4", "--supervise-min-nodes=2", "train.sh"], TEXT, (2, 4)),
        (["-N4", "--supervise-max-nodes=8", "train.sh"], TEXT, (4, 8)),
        (["--supervise-min-nodes=2", "--supervise-max-nodes=6", "--supervise-multiple-of=2", "train.sh"], TEXT, (2, 6)),
        (["train.sh"], TEXT.replace("echo", "#SBATCH -N3\n#SUPERVISE --min-nodes=1\necho"), (1, 3)),
        (["-N2", "train.sh"], TEXT.replace("echo", "#SBATCH -N3\necho"), (2, 2)),
        (["--supervise-min-nodes=2", "train.sh"], TEXT.replace("echo", "#SUPERVISE min-nodes=1\necho"), (2, 2)),
    ],
)
def test_how_many_nodes_a_run_may_have(words: list[str], text: str, nodes: tuple[int, int]) -> None:
    spec = read(*words, text=text).spec
    assert (spec.nodes.min, spec.nodes.max) == nodes


@pytest.mark.parametrize(("words", "says"), [([], None), (["--supervise-elastic=yes"], True)])
def test_a_script_can_say_whether_its_data_loader_changes_size(words: list[str], says: bool | None) -> None:
    assert read(*words, "train.sh").spec.nodes.elastic is says
    assert read("train.sh", text=TEXT.replace("echo", "#SUPERVISE elastic=no\necho")).spec.nodes.elastic is False


def test_without_a_number_of_nodes_slurm_works_it_out() -> None:
    script = read("--ntasks=8", "train.sh")
    assert not script.script.nodes_given
    assert submission(script).nodes is None


@pytest.mark.parametrize(
    ("words", "text", "part"),
    [
        (["--array=1-3", "train.sh"], TEXT, "arrays are not supervised"),
        (["train.sh"], TEXT.replace("echo", "#SBATCH -a 1-3\necho"), "arrays are not supervised"),
        (["-N1", ":", "-N2", "train.sh"], TEXT, "heterogeneous"),
        (["train.sh"], TEXT.replace("echo", "#SBATCH hetjob\necho"), "heterogeneous"),
        (["--uid=0", "train.sh"], TEXT, "runs as the account that submits it"),
        (["-N4", "--supervise-min-nodes=6", "train.sh"], TEXT, "conflicting nodes"),
        (["-N4", "--supervise-max-nodes=2", "train.sh"], TEXT, "conflicting nodes"),
        (["--supervise-min-nodes=0", "train.sh"], TEXT, "at least one"),
        (["-N2-4", "-n8", "train.sh"], TEXT, "give --ntasks-per-node"),
        (["-N2,4,8", "train.sh"], TEXT, "--supervise-multiple-of"),
        (["-w", "n1", "-x", "n1", "train.sh"], TEXT, "n1"),
        (["-x", "/home/ann/bad", "train.sh"], TEXT, "not a file"),
        (["train.sh"], TEXT.replace("echo", "#SBATCH -H\necho"), "would hold every resubmission"),
        (["--supervise-min-node=2", "train.sh"], TEXT, "did you mean --supervise-min-nodes?"),
        (["--supervise-name", "train.sh"], TEXT, "write --supervise-name=VALUE"),
        (["--supervise-name=a/b", "train.sh"], TEXT, "letters, digits"),
        (["--supervise-progress-pattern=step", "train.sh"], TEXT, "one group"),
        (["--supervise-progress-pattern=(", "train.sh"], TEXT, "not a regular expression"),
        (["--supervise-layout=zip", "train.sh"], TEXT, "one of supervisor, auto"),
        (["--supervise-elastic=maybe", "train.sh"], TEXT, "yes or no"),
        (["--supervise-stall-s=-1", "train.sh"], TEXT, "seconds"),
        (["train.sh"], TEXT.replace("echo", "#SUPERVISE --min-nodes=x\necho"), "whole number"),
        (["train.sh"], TEXT.replace("echo", "#SUPERVISE --dry-run\necho"), "line 3"),
        (["train.sh"], TEXT.replace("echo", f"#SBATCH {'-Jx ' * 9000}\necho"), "line is longer than"),
    ],
)
def test_what_cannot_be_supervised_is_refused_with_the_reason(words: list[str], text: str, part: str) -> None:
    with pytest.raises(NotSupervised, match=part.replace("?", r"\?")):
        read(*words, text=text)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "empty"),
        ("echo hello\n", "does not look like a batch script"),
        ("#!/bin/sh\r\necho hello\r\n", "DOS line breaks"),
        ("#!/bin/sh\n#SBATCH --no-such-option\n", "unrecognized option"),
    ],
)
def test_what_sbatch_would_refuse_is_refused_in_its_words(text: str, part: str) -> None:
    with pytest.raises(BadSubmission, match=part) as caught:
        read(text=text)
    assert caught.value.stderr.startswith("sbatch: ")
    assert caught.value.exit_code in {1, 255}


def test_what_is_no_time_or_partition_is_left_to_sbatch() -> None:
    script = read("--time=soon", "--partition=a b", "--qos=high", "train.sh")
    assert (script.spec.slurm.time_limit, script.spec.slurm.partition, script.spec.slurm.qos) == (None, None, "high")
    assert {"--time=soon", "--partition=a b"} <= set(script.script.options)


def test_a_list_of_sizes_that_takes_long_to_spell_out_is_none() -> None:
    """The daemon reads what anybody hands in: no request may hold its loop up."""
    text = TEXT.replace("echo", "#SBATCH --nodes=1-65536,1-65536\n" * 1000 + "echo")
    with pytest.raises(BadSubmission, match="not a valid node count"):
        read("-N1", "train.sh", text=text)


def test_supervision_options_behind_the_script_are_its_arguments() -> None:
    script = read("--supervise-name=a", "train.sh", "--supervise-name=b")
    assert (script.spec.name, script.script.arguments) == ("a", ("--supervise-name=b",))


def test_a_pattern_in_a_line_of_the_script_keeps_its_backslashes() -> None:
    text = TEXT.replace("echo", '#SUPERVISE --progress-pattern="step (\\d+) of" stall-s=30  # a comment\necho')
    progress = read(text=text).spec.progress
    assert (progress.pattern, progress.step_max_s, progress.start_max_s) == (r"step (\d+) of", 30, 30)


def test_a_script_that_may_print_seldom_is_not_ended_for_its_silence_unless_that_is_asked_for() -> None:
    assert read().spec.progress.start_max_s == 0
    assert read("--supervise-stall-s=7", "train.sh").spec.progress.start_max_s == 7


def test_a_wrapped_command_is_the_script_that_sbatch_makes_of_it() -> None:
    text = "#!/bin/sh\n# This script was created by sbatch --wrap.\n\nhostname\n"
    script = read("--wrap=hostname", text=text, path="--wrap")
    assert (script.spec.name, script.script.path) == ("wrap", "--wrap")
    with pytest.raises(NotSupervised):
        read("--wrap=hostname", text=TEXT)


def test_variables_of_sbatch_count_below_the_command_line() -> None:
    environment = {"SBATCH_PARTITION": "long", "SBATCH_TIMELIMIT": "5", "SBATCH_WAIT": "1"}
    script = read("--time=9", "train.sh", environment=environment)
    assert (script.spec.slurm.partition, script.spec.slurm.time_limit) == ("long", "9")
    assert script.wanted.is_wait
    assert "--wait" not in script.script.options


# ---------------------------------------------------------------- what a request holds


@pytest.mark.parametrize(
    "change",
    [
        {"script": 3},
        {"script": "x" * 600_000},
        {"argv": "train.sh"},
        {"argv": [1]},
        {"argv": ["a\0b"]},
        {"argv": ["a" * 140_000]},
        {"argv": ["\udcff"]},
        {"script": TEXT + "\ud800"},
        {"environment": {"A": "\ud800"}},
        {"environment": []},
        {"environment": {"A": 1}},
        {"environment": {"A": "x" * 300_000}},
        {"cwd": "here"},
        {"cwd": None},
        {"umask": "022"},
    ],
)
def test_a_malformed_request_is_refused(change: dict[str, Any]) -> None:
    body = {"script": TEXT, "path": "t", "argv": ["t"], "environment": {}, "cwd": "/", "umask": 0o022}
    assert read_handed(body).text == TEXT
    with pytest.raises(NotSupervised):
        read_handed({**body, **change})


_WORDS = st.one_of(
    st.text(max_size=12),
    st.builds("--{}={}".format, st.sampled_from([form.name for form in OPTIONS]), st.text(max_size=9)),
    st.builds("--supervise-{}={}".format, st.sampled_from([o.name for o in SUPERVISION]), st.text(max_size=9)),
    st.builds("--nodes={}{}{}".format, st.integers(0, 9), st.sampled_from("-,:"), st.integers(0, 9)),
)


@given(st.lists(_WORDS, max_size=8), st.text(max_size=120))
def test_whatever_is_handed_in_becomes_a_run_or_a_sentence(words: list[str], text: str) -> None:
    one = handed(*words, text=f"#!/bin/sh\n{text}")
    with contextlib.suppress(NotSupervised, BadSubmission):
        assert is_run_name(read_script(one).spec.name)


# ---------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("job_name", "name"), [("train", "train"), ("my job!", "my-job-"), ("..", "job"), ("", "job"), ("-x", "x")]
)
def test_a_job_name_becomes_a_legal_name_of_a_run(job_name: str, name: str) -> None:
    assert name_run(job_name) == name.rstrip("-")


@given(st.text())
def test_any_job_name_becomes_a_legal_name(job_name: str) -> None:
    assert is_run_name(name_run(job_name))


def test_a_name_is_counted_up_when_it_was_used() -> None:
    assert choose_name("train", {"other"}) == "train"
    assert choose_name("train", {"train", "train-2"}) == "train-3"


def test_the_job_keeps_its_name_unless_another_run_that_goes_on_has_it() -> None:
    """Slurm's singleton would make one of them wait for the other."""
    free = settle_names(read(), taken={"train"}, job_names={})
    assert (free.spec.name, free.script.job_name, free.notes) == ("train-2", "train", ())
    other = Run(spec=replace(free.spec, name="first"), script=free.script, state=RunState.HELD)
    busy = settle_names(read(), taken={"train"}, job_names={"train": other})
    assert (busy.spec.name, busy.script.job_name) == ("train-2", "train-2")
    assert "run first, which is held, has jobs of its name" in busy.notes[0]
    busy = settle_names(read(), taken={"train"}, job_names={"train": other, "train-2": other})
    assert (busy.spec.name, busy.script.job_name) == ("train-2", "train-2-2")


# ---------------------------------------------------------------- submitting


def test_a_submission_overrides_what_it_must_and_keeps_the_rest() -> None:
    """RR-01: whatever the script says, Slurm does not requeue."""
    script = read("-N2", "--requeue", "--comment=mine", "-x", "n7", "--mem=0", "-d", "afterok:5", "train.sh", "x")
    request = submission(script, exclude=("n3",))
    argv = commands.sbatch_argv(request)
    assert argv[-2:] == ("/var/lib/supervisor/batch/train.1.sh", "x")
    assert {"--mem=0", "--no-requeue", "--nodes=2", "--comment=sup:train:1", "--exclude=n[3,7]"} <= set(argv)
    assert "--dependency=afterok:5,singleton" in argv
    assert "--requeue" not in argv
    assert "--comment=mine" not in argv
    assert request.identity == Identity(uid=1001, gid=1002)
    assert any("--requeue is not passed on" in note for note in script.notes)


def test_a_second_submission_is_not_held_and_waits_for_nobody_but_the_first() -> None:
    script = read("--hold", "--begin=16:00", "-d", "afterok:5?afterok:6", "train.sh")
    assert "--hold" in submission(script).options
    assert submission(script).dependency == "afterok:5?afterok:6"
    second = submission(script, 2, is_first=False)
    assert (second.dependency, "--hold" in second.options) == ("singleton", False)
    assert [o for o in second.options if o.startswith("--begin")] == ["--begin=now"]


def test_the_same_submission_is_built_twice() -> None:
    """SB-07: a retry adds nothing to the arguments."""
    script = read("train.sh", "{attempt}")
    assert submission(script) == submission(script)


def test_placeholders_and_variables_tell_where_to_resume() -> None:
    script = read("train.sh", "--load={resume_from}", "{resume_step}", "{run}-{attempt}", "{other}")
    request = submission(script, 3, is_first=False, resume_path="/c/step-7", resume_step=7)
    assert request.arguments == ("--load=/c/step-7", "7", "train-3", "{other}")
    assert request.environment["SUPERVISOR_RESUME_FROM"] == "/c/step-7"
    assert request.environment["SUPERVISOR_ATTEMPT"] == "3"
    assert request.environment["PATH"] == "/bin"
    assert request.is_own_environment


@pytest.mark.parametrize(
    ("given", "kept", "key"),
    [
        ("ALL,API_KEY=hunter2", "ALL,API_KEY", "hunter2"),
        ("PATH,API_KEY=hunter2", "PATH,API_KEY", "hunter2"),
        ("NONE", "NONE", None),
        ("NIL", "NIL", None),
    ],
)
def test_values_that_export_assigns_are_kept_with_the_environment_alone(given: str, kept: str, key: str | None) -> None:
    script = read(f"--export={given}", "train.sh")
    assert (script.script.export, script.environment.get("API_KEY")) == (kept, key)
    assert "hunter2" not in repr(script.script)
    argv = commands.sbatch_argv(submission(script))
    assert not any("hunter2" in word for word in argv)


def test_a_first_submission_is_one_before_which_no_job_was() -> None:
    over = Attempt(run="r", number=1, token="t", nodes_wanted=1, planned_at=EPOCH, state=AttemptState.OVER)
    assert is_first_submission((), 1)
    assert is_first_submission((replace(over, end=AttemptEnd.REFUSED),), 2)
    assert not is_first_submission((replace(over, end=AttemptEnd.CRASHED),), 2)


# ---------------------------------------------------------------- logs


@pytest.mark.parametrize(
    ("option", "log", "shared"),
    [
        ([], "/home/ann/slurm-7.out", None),
        (["-o", "log"], "/home/ann/log", "/home/ann/log"),
        (["-o", "/logs/%x-%4j.%N"], "/logs/train-0007.n2", None),
        (["-D", "/project", "-o", "l.%j"], "/project/l.7", None),
        (["-o", "/dev/null"], None, None),
        (["-o", "%q"], None, None),
    ],
)
def test_where_the_log_of_an_attempt_is(option: list[str], log: str | None, shared: str | None) -> None:
    script = read(*option, "train.sh")
    run = Run(spec=script.spec, script=script.script)
    one = Attempt(run="train", number=1, token="t", nodes_wanted=1, planned_at=EPOCH, job_id=7, nodes=("n2", "n3"))
    assert find_log(run, one, user="ann") == (Path(log) if log else None)
    assert find_log(run, replace(one, job_id=None), user="ann") is None
    assert find_shared_log(run, user="ann") == (Path(shared) if shared else None)


# ---------------------------------------------------------------- a job that is there already

JOB = JobDescription(
    job_id=55,
    name="train",
    user="ann",
    uid=1001,
    state=JobState.RUNNING,
    raw_state="RUNNING",
    partition="long",
    time_limit="1-00:00:00",
    nodes=4,
    ntasks=8,
    cpus_per_task="1",
    memory_per_node="0",
    tres_per_node="gres/gpu:8",
    work_dir="/home/ann",
    command="/home/ann/train.sh a b",
    stdout="/home/ann/slurm-55.out",
)


def again(job: JobDescription = JOB, text: str = TEXT, line: str = "") -> tuple[str, ...]:
    submitted = read_submitted(replace(job, submit_line=line), release=(22, 5))
    return describe_resubmission(job, text, submitted, submitted.arguments or ()).words


def test_a_job_is_submitted_again_as_it_is() -> None:
    words = again()
    assert words == (
        "--nodes=4",
        "--chdir=/home/ann",
        "--partition=long",
        "--time=1-00:00:00",
        "--gres=gpu:8",
        "--ntasks-per-node=2",
        "/home/ann/train.sh",
        "a",
        "b",
    )
    spec = read(*words).spec
    assert (spec.nodes.min, spec.slurm.partition) == (4, "long")


def test_what_the_jobs_own_line_says_is_said_again_as_it_was() -> None:
    line = "sbatch --parsable -N2-4 --signal=B:USR1@60 -G8 -Dsub -oout -n8 -x./broken train.sh a b"
    words = again(replace(JOB, stdout="/home/ann/out", exclude="n9"), line=line)
    assert words == (
        "--chdir=/home/ann",
        "--partition=long",
        "--time=1-00:00:00",
        "--exclude=n9",
        "--nodes=2-4",
        "--signal=B:USR1@60",
        "--gpus=8",
        "--output=out",
        "--ntasks=8",
        "/home/ann/train.sh",
        "a",
        "b",
    )


def test_what_the_script_says_itself_is_not_said_again() -> None:
    text = TEXT.replace("echo", "#SBATCH --partition=long --gpus-per-node=8 -n8 --nodes=4\necho")
    assert not [w for w in again(text=text) if w.startswith(("--partition", "--gres", "--ntasks", "--nodes"))]


@pytest.mark.parametrize(
    ("stdout", "option"),
    [("/logs/run-55.txt", "--output=/logs/run-%j.txt"), ("/logs/155", "--output=/logs/155"), ("", None)],
)
def test_a_log_of_ones_own_becomes_a_pattern(stdout: str, option: str | None) -> None:
    words = again(replace(JOB, stdout=stdout))
    assert [w for w in words if w.startswith("--output")] == ([option] if option else [])
