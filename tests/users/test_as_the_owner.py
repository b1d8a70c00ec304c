"""A daemon that is root: whatever a person handed in is submitted, resubmitted, read and verified as that person."""

from __future__ import annotations

import re
import resource
from pathlib import Path

import pytest

from supervisor.model import AttemptEnd, CheckpointState
from tests.e2e.stage import TRAINING
from tests.users.accounts import processes_of
from tests.users.conftest import Service

pytestmark = pytest.mark.slurm

# Says what a process inherits; the first attempt saves and fails, the second is done.
SCRIPT = """\
#!/bin/bash
#SUPERVISE --backoff-s=0 --checkpoint-dir=out --layout=huggingface
n=${SUPERVISOR_ATTEMPT:-plain}
for fact in "$(id -u)" "$(id -g)" "$(id -G)" "$(umask)" "$PWD" "$SLURM_SUBMIT_DIR" "$LD_LIBRARY_PATH" \\
  "$(ulimit -Sn)" "$(ulimit -Sc)" "$(ulimit -Ss)" "$(ulimit -Sl)"; do echo "$fact"; done >"said.$n"
if [ "$n" = 1 ]; then
  mkdir -p out/checkpoint-5
  printf '%b' '\\x35\\0\\0\\0\\0\\0\\0\\0{"w":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}1234' \\
    >out/checkpoint-5/model.safetensors
  echo '{"global_step": 5}' >out/checkpoint-5/trainer_state.json
  exit 1
fi
exit 0
"""
LIMITS = {resource.RLIMIT_NOFILE: 777, resource.RLIMIT_CORE: 0, resource.RLIMIT_STACK: 4 << 20}


RUN_FILE = """
name = "filed"
command = ["{training}"]
root = "{root}"
[nodes]
min = 1
max = 1
start_checks = false
"""


def test_every_attempt_has_what_plain_sbatch_would_have_given_it(service: Service) -> None:
    stage, a = service.stage, service.a
    a.write("own/train.sh", SCRIPT)
    shell = {"cwd": a.home / "own", "umask": 0o027, "limits": LIMITS, "LD_LIBRARY_PATH": "/opt/a/lib"}
    plain = a.run("sbatch", "--parsable", "train.sh", **shell)  # type: ignore[arg-type]
    assert plain.returncode == 0, plain.stderr
    said = a.home / "own/said.plain"
    stage.wait("what plain sbatch gives", lambda: said.exists() and said.read_text().count("\n") == 11)
    ended = a.supervisor("sbatch", "--parsable", "--supervise-name=own", "train.sh", **shell)
    assert ended.returncode == 0, ended.stderr
    stage.await_state("finished", "own")
    expected = said.read_text()
    assert f"{a.uid}\n{a.gid}\n{a.gid}\n0027\n{a.home}/own\n{a.home}/own\n/opt/a/lib\n777\n0\n4096\n" in expected
    assert [(a.home / f"own/said.{n}").read_text() for n in (1, 2)] == [expected, expected]

    first, second = stage.attempts("own")
    assert (first.end, second.end, second.resume_step) == (AttemptEnd.CRASHED, AttemptEnd.FINISHED, 5)
    (checkpoint,) = stage.checkpoints("own")
    assert (checkpoint.state, checkpoint.step) == (CheckpointState.COMPLETE, 5)
    assert (a.home / "own/out").stat().st_mode & 0o077 == 0o050
    run_dir = a.home / "own/.supervisor"
    assert {p.stat().st_uid for p in (run_dir, *run_dir.rglob("*"), *(a.home / "own").glob("slurm-*.out"))} == {a.uid}


def test_a_run_file_is_run_as_its_owner_with_the_limits_of_the_shell_too(service: Service) -> None:
    stage, a = service.stage, service.a
    training = a.write(TRAINING.name, TRAINING.read_text())
    a.write("filed.toml", RUN_FILE.format(training=training, root=a.home))
    ended = a.supervisor("submit", "--no-visibility-check", "filed.toml", umask=0o027, limits=LIMITS)
    assert ended.returncode == 0, ended.stderr
    stage.await_step(1, "filed")
    (pid,) = (pid for pid in processes_of({a.uid}) if TRAINING.name in Path(f"/proc/{pid}/cmdline").read_text())
    assert "\nUmask:\t0027\n" in Path(f"/proc/{pid}/status").read_text()
    assert re.search(r"Max open files +777 ", Path(f"/proc/{pid}/limits").read_text())
    assert {p.stat().st_uid for p in ((a.home / "filed"), *(a.home / "filed").rglob("*"))} == {a.uid}
    assert list((stage.directory / "batch").iterdir()) == []  # sbatch read its copy there
    assert a.supervisor("stop", "filed").returncode == 0
    stage.await_state("stopped", "filed")
