"""Containers around a training: what srun or each rank's program is given, as text, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.workers_rig import open_agent
from trainer.container import PACKAGE_TARGET, ContainerRefused, command_prefix, in_image, srun_options
from trainer.step import srun_command

PACKAGE = "/srv/lib/python3.11/site-packages/trainer"
AGENT = ("/srv/venv/bin/python", "-P", "-m", "trainer.node", "/shared/gpt/attempts/1")


def ask(**changes: Any) -> dict[str, Any]:
    asked = {
        "runtime": "pyxis",
        "image": "nvcr.io#nvidia/pytorch:25.10-py3",
        "mounts": ("/data:/data:ro",),
        "options": ("--no-container-mount-home",),
        "workdir": "/home/u/llm",
        "run_dir": "/shared/gpt",
        "package": PACKAGE,
    }
    return {**asked, **changes}


def test_pyxis_gets_its_options_on_srun_with_the_run_directory_and_this_package_mounted() -> None:
    assert srun_options(**ask()) == (
        "--container-image=nvcr.io#nvidia/pytorch:25.10-py3",
        f"--container-mounts=/data:/data:ro,/shared/gpt:/shared/gpt,/home/u/llm:/home/u/llm,{PACKAGE}:{PACKAGE_TARGET}/trainer",
        "--container-workdir=/home/u/llm",
        "--no-container-mount-home",
    )
    assert command_prefix(**ask(), has_gpus=True) == ()


def test_apptainer_is_put_in_front_of_each_rank_s_program() -> None:
    asked = ask(runtime="apptainer", image="/images/train.sif", options=("--cleanenv",))
    assert command_prefix(**asked, has_gpus=True) == (
        "apptainer",
        "exec",
        "--bind=/data:/data:ro",
        "--bind=/shared/gpt:/shared/gpt",
        "--bind=/home/u/llm:/home/u/llm",
        f"--bind={PACKAGE}:/opt/slurm-supervisor/trainer",
        "--bind=/tmp:/tmp",
        "--pwd=/home/u/llm",
        "--nv",
        "--env=PYTHONPATH=/opt/slurm-supervisor",
        "--cleanenv",
        "/images/train.sif",
    )
    assert "--nv" not in command_prefix(**asked, has_gpus=False)
    assert command_prefix(**asked, has_gpus=False, program="singularity")[0] == "singularity"
    assert srun_options(**asked) == ()


def test_without_a_container_nothing_is_added() -> None:
    asked = ask(runtime="none", image="")
    assert (srun_options(**asked), command_prefix(**asked, has_gpus=True)) == ((), ())
    assert in_image((), AGENT) == list(AGENT)


def test_a_path_that_is_mounted_already_is_not_mounted_twice() -> None:
    options = srun_options(**ask(mounts=("/elsewhere:/shared/gpt",), workdir="/shared/gpt"))
    assert options[1].count(":/shared/gpt") == 1
    assert "--container-workdir=/x" not in srun_options(**ask(options=("--container-workdir=/x",)))[:-1]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"image": ""}, "image"),
        ({"image": "--help"}, "image"),
        ({"image": "a b"}, "image"),
        ({"image": "a,b"}, "image"),
        ({"mounts": ("/data",)}, "mounts"),
        ({"mounts": ("data:/data",)}, "mounts"),
        ({"mounts": ("/my data:/data",)}, "mounts"),
        ({"mounts": ("/a:/b,/c:/d",)}, "mounts"),
        ({"mounts": ("/a:/b:ro:x",)}, "mounts"),
        ({"mounts": ("/a:/b:RW",)}, "mounts"),
        ({"mounts": ("/a$HOME:/b",)}, "mounts"),
        ({"run_dir": "/shared/my runs/gpt"}, "run directory"),
        ({"run_dir": "/shared/a:b"}, "run directory"),
        ({"run_dir": "/shared/a,b"}, "run directory"),
        ({"workdir": "relative"}, "working directory"),
        ({"workdir": "/w\n"}, "working directory"),
        ({"package": "/srv/it's/trainer"}, "package"),
        ({"options": ("--nodes=1",)}, "--container-"),
        ({"options": ("--container-mounts=/a:/b",)}, "mounts"),
    ],
)
def test_what_can_t_be_spelled_or_would_change_the_step_is_refused_with_the_reason(
    changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ContainerRefused, match=words):
        srun_options(**ask(**changes))


@pytest.mark.parametrize("changes", [{"image": "-x"}, {"mounts": ("/a b:/c",)}, {"run_dir": "/a:b"}])
def test_apptainer_refuses_the_same(changes: dict[str, Any]) -> None:
    with pytest.raises(ContainerRefused):
        command_prefix(**ask(runtime="apptainer", **changes), has_gpus=False)


def test_the_agent_is_started_by_the_image_s_python_and_finds_this_package_behind_the_image_s_own() -> None:
    command = srun_command(["n1", "n2"], AGENT, {}, srun_options(**ask()))
    assert command[command.index("--wait=0") + 1].startswith("--container-image=")
    agent = command[command.index("sh") :]
    assert agent[3:] == [PACKAGE_TARGET, "python3", "-P", "-m", "trainer.node", "/shared/gpt/attempts/1"]


@pytest.mark.parametrize(
    ("path", "expected"), [(None, PACKAGE_TARGET), ("/opt/own", f"/opt/own:{PACKAGE_TARGET}"), ("", PACKAGE_TARGET)]
)
def test_the_start_in_an_image_is_a_shell_line_that_works(path: str | None, expected: str, tmp_path: Path) -> None:
    stand_in = tmp_path / "python3"
    stand_in.write_text('#!/bin/sh\necho "$PYTHONPATH" "$@"\n')
    stand_in.chmod(0o755)
    env = {"PATH": f"{tmp_path}:/bin:/usr/bin", **({} if path is None else {"PYTHONPATH": path})}
    command = in_image(("--container-image=x",), ("ignored", "-m", "trainer.node", "/a b"))
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=10)
    assert done.stdout == f"{expected} -m trainer.node /a b\n"


STAND_IN = """#!/bin/sh
# runs on this machine what apptainer would run in an image: the words behind the image
printf '%s\\n' "$@" > "{log}"
for word in "$@"; do
  shift
  case "$word" in
    --pwd=*) cd "${{word#--pwd=}}" ;;
    --env=*) export "${{word#--env=}}" ;;
    *.sif) break ;;
  esac
done
exec "$@"
"""


def test_ranks_behind_the_prefix_are_ranks_like_others(tmp_path: Path) -> None:
    """With a stand-in for apptainer, which is not at hand: exit code, place and environment of the program in it."""
    stand_in = tmp_path / "apptainer"
    stand_in.write_text(STAND_IN.format(log=tmp_path / "words"))
    stand_in.chmod(0o755)
    asked = ask(runtime="apptainer", image="/images/train.sif", workdir=str(tmp_path), run_dir=str(tmp_path))
    prefix = command_prefix(**asked, has_gpus=False, program=str(stand_in))
    agent = open_agent(tmp_path, "direct", prefix=prefix)
    try:
        agent.start("sh", "-c", "echo $RANK $PYTHONPATH; pwd; exit 7")
        assert agent.wait().exit_code == 7
        assert agent.out().splitlines() == [f"0 {PACKAGE_TARGET}", str(tmp_path)]
        assert (tmp_path / "words").read_text().splitlines()[:2] == ["exec", "--bind=/data:/data:ro"]
    finally:
        agent.close()


def test_a_script_in_an_image_can_import_this_package_alone(tmp_path: Path) -> None:
    """What is mounted is the folder of the package: nothing that lies beside it comes along."""
    source = Path(__file__).parents[2] / "trainer"
    target = tmp_path / "trainer"
    target.symlink_to(source)
    code = "import trainer.contract, trainer.nccl, trainer.node, sys; sys.exit('supervisor' in sys.modules)"
    env = {"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"}
    subprocess.run([sys.executable, "-S", "-c", code], env=env, cwd="/", check=True, timeout=30)
