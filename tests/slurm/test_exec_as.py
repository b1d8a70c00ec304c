"""A tool is run as somebody else: nothing of root's is left, and nothing of the person's acts before."""

from __future__ import annotations

import os
import pwd
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from slurm import exec_as
from slurm.errors import SlurmRefused
from slurm.inherited import Inherited, SoftLimit
from slurm.run_as import run_as
from slurm.types import Identity

NOBODY = Identity(uid=65534, gid=65534, umask=0o027)
only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")

STATUS = """
import os, sys
print(os.getresuid(), os.getresgid(), os.getgroups(), oct(os.umask(0)), os.getcwd(), sys.argv[1:], sorted(os.environ))
print(sorted(os.listdir("/proc/self/fd"))[:4], sys.stdin.read() == "")
"""


def make_tool(folder: Path, body: str, name: str = "sbatch") -> str:
    """The folder, for a PATH."""
    for parent in (folder, *folder.parents[:2]):
        parent.chmod(0o755)
    tool = folder / name
    tool.write_text(f"#!{python()} -S\n{body}")
    tool.chmod(0o755)
    return str(folder)


def python() -> str:
    """An interpreter that others may run."""
    return shutil.which("python3", path="/usr/bin:/usr/local/bin") or sys.executable


@only_root
def test_a_tool_runs_as_the_person_with_the_persons_groups_umask_directory_and_environment(tmp_path: Path) -> None:
    path = make_tool(tmp_path, STATUS)
    env = {"HOME": "/nonexistent", "PATH": "/nowhere", "A": "\udcff"}
    done = run_as(("sbatch", "a b", ""), 30, env, identity=NOBODY, directory=tmp_path, path=path)
    groups = os.getgrouplist(pwd.getpwuid(NOBODY.uid).pw_name, NOBODY.gid)
    ids = (NOBODY.uid,) * 3, (NOBODY.gid,) * 3, groups
    assert done.stdout.splitlines()[0].startswith(f"{ids[0]} {ids[1]} {ids[2]} 0o27 {tmp_path} ['a b', '']")
    assert "['A', 'HOME'" in done.stdout
    assert done.stdout.splitlines()[1] == "['0', '1', '2', '3'] True"
    assert (done.returncode, done.stderr) == (0, "")


@only_root
def test_a_uid_without_an_account_gets_its_group_alone(tmp_path: Path) -> None:
    path = make_tool(tmp_path, STATUS)
    done = run_as(("sbatch",), 30, {}, identity=Identity(uid=54321, gid=54322), directory=None, path=path)
    assert done.stdout.startswith("(54321, 54321, 54321) (54322, 54322, 54322) [54322]")


@only_root
def test_root_cannot_be_had_back(tmp_path: Path) -> None:
    path = make_tool(tmp_path, "import os\nos.setuid(0)\n")
    done = run_as(("sbatch",), 30, {}, identity=NOBODY, directory=None, path=path)
    assert "PermissionError" in done.stderr


@only_root
def test_a_directory_that_the_person_may_not_enter_is_refused_and_nothing_is_run(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    path = make_tool(tmp_path, f"open({str(ran)!r}, 'w')\n")
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    with pytest.raises(SlurmRefused, match="closed: Permission denied") as caught:
        run_as(("sbatch",), 30, {}, identity=NOBODY, directory=closed, path=path)
    assert caught.value.returncode == 119
    assert not ran.exists()


@only_root
def test_what_a_person_preloads_is_loaded_by_the_tool_alone(tmp_path: Path) -> None:
    """The program that drops the rights is still root: it must not see LD_PRELOAD or PYTHONSTARTUP."""
    path = make_tool(tmp_path, "import os\nprint(os.environ['LD_PRELOAD'])\n")
    done = run_as(("sbatch",), 30, {"LD_PRELOAD": "/no/such.so"}, identity=NOBODY, directory=None, path=path)
    complaints = [line for line in done.stderr.splitlines() if "/no/such.so" in line]
    assert done.stdout == "/no/such.so\n"
    assert len(complaints) == 1  # the tool's own; the program before it would have complained too


LIMITS_SAID = """
import resource
print(*(resource.getrlimit(n) for n in (resource.RLIMIT_NOFILE, resource.RLIMIT_CORE)))
"""


@pytest.mark.parametrize("identity", [None, pytest.param(NOBODY, marks=only_root)], ids=["as itself", "as another"])
def test_the_persons_soft_limits_are_set_and_none_above_the_services_hard_one(
    tmp_path: Path, identity: Identity | None
) -> None:
    path, most = make_tool(tmp_path, LIMITS_SAID), resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    wanted = (SoftLimit(name="NOFILE", value=77), SoftLimit(name="CORE", value=0))
    shell, greedy = Inherited(limits=wanted), Inherited(limits=(SoftLimit(name="NOFILE", value=2**62),))
    done = run_as(("sbatch",), 30, {}, identity=identity, directory=None, path=path, inherited=shell)
    assert done.stdout.startswith(f"(77, {most}) (0, "), done.stderr
    done = run_as(("sbatch",), 30, {}, identity=identity, directory=None, path=path, inherited=greedy)
    assert done.stdout.startswith(f"({most}, {most})"), done.stderr


def test_an_environment_of_a_megabyte_arrives_whole(tmp_path: Path) -> None:
    path = make_tool(tmp_path, "import os\nprint(sum(map(len, os.environ.values())))\n")
    env = {f"V{number}": "x" * 100_000 for number in range(10)}
    done = run_as(("sbatch",), 30, env, identity=None, directory=tmp_path, path=path)
    assert int(done.stdout) >= 1_000_000


def test_the_tool_is_not_looked_up_on_the_persons_path(tmp_path: Path) -> None:
    theirs = make_tool(tmp_path, "print('theirs')\n")
    with pytest.raises(FileNotFoundError):
        run_as(("sbatch",), 30, {"PATH": theirs}, identity=None, directory=tmp_path, path=str(tmp_path / "none"))


def test_the_exit_code_and_the_words_of_the_tool_are_its_own(tmp_path: Path) -> None:
    path = make_tool(tmp_path, "import sys\nprint('7')\nsys.stderr.write('note\\n')\nsys.exit(3)\n")
    done = run_as(("sbatch",), 30, {}, identity=None, directory=tmp_path, path=path)
    assert (done.returncode, done.stdout, done.stderr) == (3, "7\n", "note\n")


def test_a_tool_that_does_not_answer_is_killed(tmp_path: Path) -> None:
    path = make_tool(tmp_path, "import time\ntime.sleep(600)\n")
    assert run_as(("sbatch",), 1.0, {}, identity=None, directory=tmp_path, path=path).returncode is None


@pytest.mark.parametrize("wrong", [{"A\0": "x"}, {"A": "\0"}, {"A=B": "x"}, {"": "x"}])
def test_an_environment_that_no_process_can_have_is_refused(tmp_path: Path, wrong: dict[str, str]) -> None:
    path = make_tool(tmp_path, "print('ran')\n")
    with pytest.raises(SlurmRefused, match="was not started"):
        run_as(("sbatch",), 30, wrong, identity=None, directory=tmp_path, path=path)


def test_a_directory_that_is_gone_is_refused_by_its_name(tmp_path: Path) -> None:
    path = make_tool(tmp_path, "print('ran')\n")
    with pytest.raises(SlurmRefused, match="gone: No such file or directory"):
        run_as(("sbatch",), 30, {}, identity=None, directory=tmp_path / "gone", path=path)


def test_without_roots_rights_nobody_else_can_be_become(tmp_path: Path) -> None:
    path = make_tool(tmp_path, "print('ran')\n")
    program = tmp_path / "exec_as.py"
    shutil.copy(exec_as.__file__, program)
    done = subprocess.run(
        [python(), "-I", "-S", str(program)],
        input=exec_as.render_order(f"{path}/sbatch", ("sbatch",), {}, uid=12345, gid=12345),
        capture_output=True,
        user=NOBODY.uid if os.geteuid() == 0 else None,
        group=NOBODY.gid if os.geteuid() == 0 else None,
        timeout=30,
        check=False,
    )
    assert (done.returncode, done.stdout) == (exec_as.FAILED_EXIT, b"")
    assert done.stderr.startswith(b"exec_as: can't run as uid 12345, gid 12345: the service is uid ")


@pytest.mark.parametrize("order", [b"", b"{", b"\xff", b"[]", b'"x"', b"{}"])
def test_an_order_that_cannot_be_read_runs_nothing(order: bytes) -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-S", exec_as.__file__], input=order, capture_output=True, timeout=30, check=False
    )
    assert (done.returncode, done.stdout) == (exec_as.FAILED_EXIT, b"")
    assert done.stderr.startswith(b"exec_as: the order can't be read")


@pytest.mark.parametrize("half", [{"uid": 65534}, {"gid": 65534}])
def test_half_an_account_is_no_account(tmp_path: Path, half: dict[str, int]) -> None:
    path = make_tool(tmp_path, "print('ran')\n")
    order = exec_as.render_order(f"{path}/sbatch", ("sbatch",), {}, **half)  # type: ignore[arg-type]
    done = subprocess.run(
        [sys.executable, "-I", "-S", exec_as.__file__], input=order, capture_output=True, timeout=30, check=False
    )
    assert (done.returncode, done.stdout) == (exec_as.FAILED_EXIT, b"")
