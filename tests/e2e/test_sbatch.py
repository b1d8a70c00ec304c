"""`supervisor sbatch` and `supervisor adopt` on a real cluster: a person's own script, unchanged."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from slurm.types import JobState
from supervisor.model import AttemptEnd
from tests.e2e.conftest import OpenStage
from tests.e2e.stage import SUPERVISOR, Stage

pytestmark = pytest.mark.slurm

SECRET = "hunter2-0x5eed"

# Ends as the file `plan` says for this attempt; without a line for it, as it likes: with 0.
SCRIPT = """\
#!/bin/bash
#SBATCH --job-name=train
#SBATCH --output=logs/%x-%j.out
#SBATCH --requeue
#SUPERVISE --max-restarts=4
n=${SUPERVISOR_ATTEMPT:-0}
echo "attempt=$n nodes=$SLURM_JOB_NUM_NODES arguments=$*|$# key=$API_KEY at=$PWD"
until [ -e "end.$n" ]; do echo .; sleep 0.1; done
exit $(cat "end.$n")
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Person:
    """Somebody with a script in a folder, at a shell."""

    stage: Stage
    home: Path

    def call(self, *words: str, script: str | None = None, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*SUPERVISOR, *words],
            cwd=self.home,
            env={**self.stage.env, "PYTHONPATH": str(Path(__file__).parents[2]), "API_KEY": SECRET, **env},
            input=script,
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )

    def sbatch(self, *words: str) -> str:
        ended = self.call("sbatch", *words)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    def plain_sbatch(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        """The real one."""
        return subprocess.run(
            ["sbatch", *words],
            cwd=self.home,
            env={**self.stage.env, "PYTHONPATH": str(Path(__file__).parents[2]), **env},
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )

    def end(self, attempt: int, code: int) -> None:
        """Let an attempt end with this code as soon as it is there."""
        (self.home / f"end.{attempt}").write_text(str(code))

    def log(self, job_id: int | None) -> str:
        path = self.home / f"logs/train-{job_id}.out"
        return path.read_text() if path.exists() else ""

    def await_log(self, number: int, run: str = "train", limit_s: float = 30) -> str:
        """The first line of attempt `number`."""

        def first_line() -> str | None:
            found = [a for a in self.stage.attempts(run) if a.number == number]
            return self.log(found[0].job_id).partition("\n")[0] if found else None

        return self.stage.wait(f"a line of attempt {number}", first_line, limit_s)


def person(stage: Stage) -> Person:
    home = stage.directory / "home"
    (home / "logs").mkdir(parents=True)
    (home / "train.sh").write_text(SCRIPT)
    return Person(stage=stage, home=home)


@pytest.fixture
def ann(stage: Stage) -> Person:
    return person(stage)


def test_a_script_is_submitted_again_unchanged_with_its_arguments_and_environment(ann: Person) -> None:
    """Fails, then saves and asks to go on, then is done: three jobs, and no secret in the ledger or in a log."""
    for number, code in ((1, 3), (2, 75), (3, 0)):
        ann.end(number, code)
    ended = ann.call("sbatch", "--nodes=1", "train.sh", "two words", "{attempt}", "-N9")
    assert (ended.returncode, ended.stdout) == (0, "Submitted batch job 1\n")
    assert "supervisor: --requeue is not passed on" in ended.stderr
    assert SECRET not in json.dumps(ann.stage.status()) + ann.call("daemon", "--once", "--dry-run").stdout
    kept = ann.stage.directory / "submissions/train.json"
    assert (kept.stat().st_mode & 0o777, kept.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    ann.stage.await_state("finished", "train")
    attempts = ann.stage.attempts("train")
    assert [a.end for a in attempts] == [AttemptEnd.CRASHED, AttemptEnd.SAVED, AttemptEnd.FINISHED]
    for attempt in attempts:
        first = ann.log(attempt.job_id).partition("\n")[0]
        assert f"attempt={attempt.number} nodes=1 arguments=two words {attempt.number} -N9|3 key={SECRET}" in first
        assert f"at={ann.home}" in first
    ann.stage.wait("removal of what was handed in", lambda: not kept.exists())
    held = [p for p in ann.stage.directory.iterdir() if p.is_file()]
    assert any(p.name.endswith("-wal") for p in held)
    assert [p.name for p in held if SECRET.encode() in p.read_bytes()] == []
    assert ann.stage.status()["runs"][0]["interruptions"] == 1
    saved, last = attempts[1:]
    assert saved.over_at is not None
    assert (last.planned_at - saved.over_at).total_seconds() < 10  # no back-off


def test_answers_and_exit_codes_are_those_of_sbatch(ann: Person) -> None:
    for attempt in (1, 2):
        ann.end(attempt, 0)
    assert ann.sbatch("--parsable", "train.sh") == "1\n"
    (ann.home / "x.sh").write_text("#!/bin/sh\n")
    ended = ann.call("sbatch", "-J", "from-stdin", script="#!/bin/sh\necho $1\n")
    assert ended.stdout == "Submitted batch job 2\n"
    assert ann.call("sbatch", "--quiet", "--wrap=exit 0").stdout == ""
    for words in (
        ["--partition=nowhere", "train.sh"],
        ["nothere.sh"],
        ["--bogus", "train.sh"],
        ["-N4-2", "train.sh"],
        ["--time=soon", "x.sh"],
    ):
        ours = ann.call("sbatch", *words)
        theirs = ann.plain_sbatch(*words)
        assert (ours.returncode, ours.stdout) == (theirs.returncode, theirs.stdout)
        assert [line for line in ours.stderr.splitlines() if not line.startswith("supervisor: ")] == (
            theirs.stderr.splitlines()
        )
    assert ann.call("sbatch", "--wait", "--job-name=waited", "--wrap=exit 93").returncode == 93
    assert not [run for run in ann.stage.status()["runs"] if run["state"] == "active"]


# What differs by itself, by our doing, or because it names an own list.
_DIFFERS = {"SLURM_JOB_ID", "SLURM_JOBID", "SLURM_TASK_PID", "SLURM_JOB_DEPENDENCY", "SLURM_OPEN_MODE"}
_DIFFERS |= {"SLURM_EXPORT_ENV"}


def test_a_job_has_the_environment_that_plain_sbatch_gives_it(ann: Person) -> None:
    (ann.home / "env.sh").write_text('#!/bin/bash\nenv -0 >"$1.part"; mv "$1.part" "$1"\n')
    theirs = {"SBATCH_ACCOUNT": "lab", "SLURM_MPI_TYPE": "none", "PMIX_MCA_gds": "hash", "TWO": "a\nb"}
    theirs |= {"API_KEY": SECRET, "BASH_FUNC_module%%": "() {  echo $*\n}"}
    exports = ("ALL", "ALL,X=1", "NONE")
    for number, export in enumerate(exports):
        words = (f"--job-name=env{number}", "--nodelist=n1", f"--export={export}", "env.sh")
        assert ann.plain_sbatch(*words, f"plain{number}", **theirs).returncode == 0
        assert ann.call("sbatch", *words, f"ours{number}", **theirs).returncode == 0
    for number, export in enumerate(exports):
        plain, ours = (read_environment(ann, f"{whose}{number}") for whose in ("plain", "ours"))
        assert ours == plain, export
        assert ("SBATCH_ACCOUNT" in ours) == (export != "NONE")


def read_environment(ann: Person, name: str) -> dict[str, str]:
    path = ann.home / name
    ann.stage.wait(f"the environment of {name}", path.exists)
    pairs = (pair.partition("=") for pair in path.read_text().split("\0"))
    return {n: value for n, _, value in pairs if n not in _DIFFERS and not n.startswith("SUPERVISOR_")}


def test_a_script_on_a_node_that_is_cut_goes_on_with_fewer_nodes(
    open_stage: OpenStage, namespaces_permitted: None
) -> None:
    ann = person(open_stage(nodes=3, mode="isolated"))
    ann.sbatch("--nodes=3", "--supervise-min-nodes=1", "train.sh")
    assert "nodes=3" in ann.await_log(1)
    ann.stage.sandbox.power_cut("n3")
    ann.end(2, 0)
    assert "attempt=2 nodes=2" in ann.await_log(2, limit_s=60)
    ann.stage.await_state("finished", "train")
    assert ann.stage.attempt(1, "train").end in {AttemptEnd.NODE_SILENT, AttemptEnd.NODE_FAILED}


def test_a_running_job_is_adopted_and_submitted_again_when_it_fails(ann: Person) -> None:
    assert ann.plain_sbatch("--nodes=2", "train.sh", "two words").returncode == 0
    ann.stage.wait("the job's first line", lambda: ann.log(1))
    refused = ann.call("adopt", "999")
    assert (refused.returncode, "no job 999" in refused.stderr) == (2, True)
    unsure = ann.call("adopt", "1", "--supervise-name=taken")
    assert (unsure.returncode, "`supervisor adopt 1 -- " in unsure.stderr) == (2, True), unsure.stderr
    dry = ann.call("adopt", "1", "--supervise-dry-run", "--supervise-json", "--", "two words")
    told = json.loads(dry.stdout)["resubmission"]
    assert (told["script"], told["arguments"]) == (str(ann.home / "train.sh"), ["two words"])
    assert ann.stage.status()["runs"] == []
    ended = ann.call("adopt", "1", "--supervise-name=taken", "--", "two words")
    assert ended.returncode == 0, ended.stderr
    assert "train.sh 'two words'" in ended.stderr
    assert "environment of this shell" in ended.stderr
    ann.stage.wait("our token", lambda: ann.stage.jobs()[0].comment == ann.stage.attempt(1, "taken").token)
    again = ann.call("adopt", "1", "--", "two words")
    assert (again.returncode, "attempt 1 of run taken" in again.stderr) == (4, True)
    ann.end(0, 1)
    ann.end(2, 0)
    ann.stage.await_state("finished", "taken")
    first, second = ann.stage.attempts("taken")
    assert (first.job_id, first.end, second.end) == (1, AttemptEnd.CRASHED, AttemptEnd.FINISHED)
    assert f"attempt=2 nodes=2 arguments=two words|1 key={SECRET}" in ann.log(second.job_id)
    over = ann.call("adopt", "1", "--", "two words")
    assert (over.returncode, "ended already" in over.stderr) == (4, True)


def test_what_was_kept_and_is_gone_holds_the_run_with_the_way_on(ann: Person) -> None:
    ann.sbatch("train.sh")
    ann.await_log(1)
    (ann.stage.directory / "submissions/train.json").unlink()
    ann.end(1, 1)
    held = ann.stage.await_state("held", "train")
    assert "submissions/train.json are gone" in held.reason
    assert "submit the script again" in held.reason
    assert len(ann.stage.jobs()) == 1


def test_two_scripts_of_one_job_name_run_side_by_side(ann: Person) -> None:
    """Slurm's singleton would make the second wait for the first."""
    ann.sbatch("train.sh")
    second = ann.call("sbatch", "--output=other", "train.sh")
    assert "the job is named 'train-2'" in second.stderr
    ann.stage.wait("two running jobs", lambda: [j.state for j in ann.stage.jobs()] == [JobState.RUNNING] * 2)


def test_without_a_daemon_nothing_is_submitted_and_nothing_is_left(open_stage: OpenStage) -> None:
    ann = person(open_stage(is_up=False))
    ended = ann.call("sbatch", "train.sh")
    assert (ended.returncode, ended.stdout) == (3, "")
    assert "plain sbatch would run it unsupervised" in ended.stderr
    assert ann.stage.jobs() == ()
    assert not (ann.home / ".supervisor").exists()
    orphan = ann.stage.directory / "submissions/orphan.json"  # of a daemon that died before it committed the run
    orphan.parent.mkdir()
    orphan.touch()
    os.utime(orphan, (0, 0))  # long ago: a younger one may be of a run that an older ledger does not know
    ann.stage.start_daemon()
    ann.stage.wait("removal of what no run needs", lambda: not orphan.exists())


# Out of time it has Slurm requeue its job and ends with 0, as many do: refused, it would look finished.
REQUEUING = """\
#!/bin/bash
#SBATCH --output=logs/%x-%j.out
trap 'scontrol requeue $SLURM_JOB_ID; exit 0' USR1
echo "count=${SLURM_RESTART_COUNT:-0}"
[ -n "$SLURM_RESTART_COUNT" ] && exit 0
while true; do sleep 0.1; done
"""


def test_a_script_that_has_itself_requeued_goes_on_as_a_new_job(ann: Person) -> None:
    """One that was handed in, and one whose job was adopted."""
    (ann.home / "own.sh").write_text(REQUEUING)
    assert "scontrol requeue" in ann.call("sbatch", "--job-name=handed", "own.sh").stderr
    assert ann.plain_sbatch("--job-name=adopted", "own.sh").returncode == 0
    logs = [ann.home / f"logs/{name}.out" for name in ("handed-1", "adopted-2")]
    ann.stage.wait("both", lambda: all(log.exists() and log.read_text() for log in logs))
    assert ann.call("adopt", "2").returncode == 0
    ann.stage.wait("our token", lambda: all(job.comment.startswith("sup:") for job in ann.stage.jobs()))
    assert ann.stage.sandbox.run("scancel", "--batch", "--signal=USR1", "1", "2").returncode == 0
    for run in ("handed", "adopted"):
        ann.stage.await_state("finished", run)
        assert [a.end for a in ann.stage.attempts(run)] == [AttemptEnd.SAVED, AttemptEnd.FINISHED]
        assert (ann.home / f"logs/{run}-{ann.stage.attempt(2, run).job_id}.out").read_text() == "count=1\n"


# Saves as transformers does: the folder, its state last. Begins behind the step that it is told.
SAVING = """\
#!/bin/bash
#SBATCH --job-name=train
#SBATCH --output=all.log
#SUPERVISE --checkpoint-dir=out --layout=huggingface --progress-pattern="step ([0-9]+)"
echo "resume=$2 from=$SUPERVISOR_RESUME_FROM"
for n in $(seq $(($2 + 1)) 40); do
  echo "step $n"
  if [ $((n % 5)) = 0 ]; then
    mkdir "out/checkpoint-$n"
    cp model.safetensors "out/checkpoint-$n/"
    echo "{\\"global_step\\": $n}" >"out/checkpoint-$n/trainer_state.json"
  fi
  [ -e "crash.$n" ] && rm "crash.$n" && exit 1
  sleep 0.1
done
"""


def test_a_script_of_another_framework_resumes_from_its_newest_whole_checkpoint(ann: Person) -> None:
    """All attempts write to one log; the half-written checkpoint of step 15 is passed over."""
    header = b'{"w":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}'
    (ann.home / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"1234")
    (ann.home / "out/checkpoint-15").mkdir(parents=True)
    (ann.home / "save.sh").write_text(SAVING.replace("mkdir ", "mkdir -p "))
    (ann.home / "crash.13").touch()
    assert ann.sbatch("save.sh", "--load={resume_from}", "{resume_step}").startswith("Submitted")
    ann.stage.await_state("finished", "train", limit_s=60)
    first, second = ann.stage.attempts("train")
    assert (first.end, first.resume_step, first.last_step) == (AttemptEnd.CRASHED, 0, 13)
    assert (second.end, second.resume_step, second.last_step) == (AttemptEnd.FINISHED, 10, 40)
    assert second.resume_path == str(ann.home / "out/checkpoint-10")
    text = (ann.home / "all.log").read_text()
    assert f"resume=10 from={ann.home}/out/checkpoint-10" in text
    assert second.log_offset == text.index("resume=10")


def test_a_changed_comment_and_name_make_a_job_no_other_and_stop_ends_it(ann: Person) -> None:
    """The owner notes something on the running job: one job, which is followed on, gets our token back and is ended."""
    ann.sbatch("--nodes=1", "train.sh")
    ann.await_log(1)
    stage = ann.stage
    stage.wait("the job as seen", lambda: stage.attempt(1, "train").slurm_submit_at)
    changed = ("scontrol", "update", "jobid=1", "comment=note to self", "name=other")
    subprocess.run(changed, env=stage.env, timeout=30, check=True)
    token = stage.attempt(1, "train").token
    (job,) = stage.wait("our token on it", lambda: [j for j in stage.jobs() if j.comment == token] or None)
    assert (job.job_id, job.name, job.state) == (1, "other", JobState.RUNNING)
    assert (stage.live_attempts("train"), len(stage.jobs())) == ([1], 1)
    assert ann.call("stop", "train").returncode == 0
    stage.await_state("stopped", "train")
    stage.wait("its job's end", lambda: not any(j.is_live for j in stage.jobs()))  # scancel follows the ledger
    assert [a.end for a in stage.attempts("train")] == [AttemptEnd.STOPPED]
