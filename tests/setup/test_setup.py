"""What `make setup` does on machines of every kind; the system's commands are played, the script is the real one."""

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Plays `python3`: makes an environment whose own python plays pip, and writes down that it was asked.
PYTHON = r"""
echo "python $*" >>"$CALLS"
case "$*" in
  *version_info*) exit "${PYTHON_IS_OLD:-0}" ;;
  --version) echo "Python ${PYTHON_VERSION:-3.11.2}" ;;
  "-m venv .venv")
    mkdir -p .venv/bin
    printf '#!/bin/sh\necho "venv-python $*" >>"$CALLS"\n' >.venv/bin/python
    chmod +x .venv/bin/python ;;
esac
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkout:
    """A checkout on a machine whose commands are played."""

    path: Path
    bin: Path
    env: dict[str, str]

    def play(self, command: str, script: str) -> None:
        played = self.bin / command
        played.write_text(f"#!/bin/sh\n{script}\n")
        played.chmod(0o755)

    def has_packages(self, *names: str) -> None:
        self.play("dpkg-query", "\n".join(f"echo {name} installed" for name in names))

    def set_up(self, **env: str) -> subprocess.CompletedProcess[str]:
        (self.path / "calls").write_text("")
        return subprocess.run(
            ["scripts/setup"],
            cwd=self.path, env=self.env | env, check=False, capture_output=True, text=True, timeout=60,
        )  # fmt: skip

    @property
    def calls(self) -> str:
        return (self.path / "calls").read_text()


def wanted_packages() -> list[str]:
    lines = (ROOT / "scripts" / "debian-packages.txt").read_text().splitlines()
    return [line.split()[1] for line in lines if line and not line.startswith("#")]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    """A Debian with every package, an ordinary account and no sudo; nothing set up yet."""
    path, folder = tmp_path / "checkout", tmp_path / "bin"
    (path / "scripts").mkdir(parents=True)
    folder.mkdir()
    for name in ("scripts/setup", "scripts/debian-packages.txt", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, path / name)
    checkout = Checkout(
        path=path, bin=folder, env={"PATH": f"{folder}:{os.environ['PATH']}", "CALLS": str(path / "calls")}
    )
    checkout.play("python3", PYTHON)
    checkout.play("id", 'case "$1" in -u) echo 1000 ;; *) echo someone ;; esac')
    checkout.play("sudo", "exit 1")
    checkout.play("apt-get", "exit 1")
    checkout.has_packages(*wanted_packages())
    return checkout


def test_the_first_call_makes_the_environment_with_the_pinned_versions(checkout: Checkout) -> None:
    done = checkout.set_up()
    assert done.returncode == 0, done.stderr
    assert "-m venv .venv" in checkout.calls
    assert "--constraint constraints.txt" in checkout.calls


def test_the_next_call_does_nothing_and_says_nothing(checkout: Checkout) -> None:
    checkout.set_up()
    done = checkout.set_up()
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert "pip install" not in checkout.calls


def test_changed_pins_are_installed_into_the_environment_that_is_there(checkout: Checkout) -> None:
    checkout.set_up()
    (checkout.path / "constraints.txt").write_text("click==8.1\n")
    checkout.set_up()
    assert "pip install" in checkout.calls
    assert "-m venv" not in checkout.calls


def test_an_environment_that_a_killed_set_up_left_is_made_anew(checkout: Checkout) -> None:
    checkout.set_up()
    half_made = checkout.path / ".venv" / "half-made"
    half_made.touch()
    (checkout.path / ".setup" / "unfinished").touch()
    assert checkout.set_up().returncode == 0
    assert not half_made.exists()


def test_a_broken_environment_is_made_anew(checkout: Checkout) -> None:
    checkout.set_up()
    (checkout.path / ".venv" / "bin" / "python").write_text("#!/bin/sh\nexit 1\n")
    assert checkout.set_up().returncode == 0
    assert "-m venv .venv" in checkout.calls


def test_a_checkout_that_was_moved_is_set_up_again(checkout: Checkout, tmp_path: Path) -> None:
    checkout.set_up()
    moved = Checkout(path=checkout.path.rename(tmp_path / "moved"), bin=checkout.bin, env=checkout.env)
    moved.env["CALLS"] = str(moved.path / "calls")
    moved.set_up()
    assert "pip install" in moved.calls


def test_an_old_python_ends_it_with_the_version_that_is_needed(checkout: Checkout) -> None:
    for newer in ("python3.11", "python3.12", "python3.13", "python3.14"):
        checkout.play(newer, "exit 1")
    done = checkout.set_up(PYTHON_IS_OLD="1", PYTHON_VERSION="3.9.2")
    assert done.returncode == 1
    assert "Python 3.11 or newer is needed; python3 is Python 3.9.2" in done.stderr


def test_a_failed_pip_shows_the_end_of_its_log(checkout: Checkout) -> None:
    checkout.play(
        "python3",
        PYTHON.replace('>>"$CALLS"\\n', '>>"$CALLS"\\ncase "$*" in *install*) echo no space left; exit 1 ;; esac\\n'),
    )
    done = checkout.set_up()
    assert done.returncode == 1
    assert "no space left" in done.stderr


def test_without_root_the_missing_packages_are_named_and_the_rest_goes_on(checkout: Checkout) -> None:
    checkout.has_packages(*[name for name in wanted_packages() if name != "iproute2"])
    done = checkout.set_up()
    assert done.returncode == 0
    assert "as root, run 'apt-get install --no-install-recommends iproute2'" in done.stdout
    assert "pip install" in checkout.calls


def test_with_sudo_only_the_missing_packages_are_installed_after_an_update(checkout: Checkout) -> None:
    checkout.has_packages(*[name for name in wanted_packages() if name != "iproute2"])
    checkout.play("sudo", 'echo "sudo $*" >>"$CALLS"')
    assert checkout.set_up().returncode == 0
    apt = [call for call in checkout.calls.splitlines() if "apt-get" in call]
    assert [call.split()[-1] for call in apt] == ["update", "iproute2"]


def test_a_failed_installation_is_tried_twice_and_ends_it(checkout: Checkout) -> None:
    checkout.has_packages(*[name for name in wanted_packages() if name != "iproute2"])
    checkout.play("sudo", 'echo "sudo $*" >>"$CALLS"; case "$*" in *install*) echo unable to locate; exit 100 ;; esac')
    done = checkout.set_up()
    assert done.returncode == 1
    assert checkout.calls.count("--no-install-recommends") == 2
    assert "unable to locate" in done.stderr


def test_slurm_from_elsewhere_is_left_as_it_is(checkout: Checkout) -> None:
    for command in ("slurmctld", "slurmd", "sbatch", "srun", "scontrol"):
        checkout.play(command, "")
    checkout.has_packages(*[name for name in wanted_packages() if not name.startswith("slurm")])
    assert "apt-get" not in checkout.set_up().stdout
