"""A machine of its own for one test: a real systemd in namespaces, and what tests do with it from outside."""

import contextlib
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

CHECKOUT = Path(__file__).parents[2]
BOOT = Path(__file__).with_name("boot.sh")
BOOT_LIMIT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A booted machine, known by its init process as this machine sees it."""

    init_pid: int

    def run(self, *argv: str, check: bool = True, stdin: str = "") -> str:
        """What a command prints when root runs it in there."""
        namespaces = ["--mount", "--pid", "--net", "--uts", "--ipc", "--cgroup", "--root", "--wd"]
        done = subprocess.run(
            ["nsenter", f"--target={self.init_pid}", *namespaces, *argv],
            check=False, input=stdin, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0 or not check, f"{argv}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def install(self, path: str, text: str, *, mode: str = "644") -> None:
        """Put a file there."""
        self.run("install", "-D", f"--mode={mode}", "/dev/stdin", path, stdin=text)

    def show(self, name: str, unit: str = "supervisor.service") -> str:
        """One property of a unit, as systemd sees it."""
        return self.run("systemctl", "show", "--value", f"--property={name}", unit)

    def journal(self, unit: str = "supervisor.service") -> str:
        """What the unit, and systemd about it, wrote."""
        return self.run("journalctl", "--no-pager", "--output=cat", f"--unit={unit}", check=False)

    def wait_until(self, what: str, is_so: Callable[[], bool], *, limit_s: float = 30) -> None:
        """Return once something is so; with the journal as evidence when it never is."""
        deadline = time.monotonic() + limit_s
        while not is_so():
            assert time.monotonic() < deadline, f"not within {limit_s:g} s: {what}\n{self.journal()}"
            time.sleep(0.05)


@contextlib.contextmanager
def booted_machine(unit_dir: Path) -> Iterator[Machine]:
    """A machine that has reached its basic target, with the units of `unit_dir`; nothing of it is left at the end."""
    root = Path(tempfile.mkdtemp(prefix="supervisor-machine-"))
    cgroup = f"supervisor-machine-{uuid.uuid4().hex[:12]}"
    with (root.parent / f"{root.name}.log").open("w+") as log:
        try:
            # pdeathsig: when the tests are killed, so is the machine; its namespaces, and the mounts, go with it.
            outer = subprocess.Popen(
                ["unshare", "--mount", "--propagation=private", "setpriv", "--pdeathsig=KILL",
                 BOOT, root, cgroup, CHECKOUT, unit_dir],
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
            try:
                yield Machine(init_pid=_wait_for_init(outer, Path(log.name)))
            finally:
                outer.kill()
                outer.wait(timeout=30)
                _remove_cgroup(cgroup)
        finally:
            root.rmdir()
            Path(log.name).unlink()


def _wait_for_init(outer: subprocess.Popen[bytes], log: Path) -> int:
    deadline = time.monotonic() + BOOT_LIMIT_S
    while time.monotonic() < deadline and outer.poll() is None:
        init_pid = _only_child(outer.pid)
        if init_pid and _is_up(init_pid):
            return init_pid
        time.sleep(0.05)
    raise AssertionError(f"the machine did not boot: {log.read_text()}")


def _only_child(pid: int) -> int | None:
    with contextlib.suppress(OSError):
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return int(children[0]) if len(children) == 1 else None
    return None


def _is_up(init_pid: int) -> bool:
    with contextlib.suppress(OSError):
        if not Path(f"/proc/{init_pid}/comm").read_text().startswith("systemd"):
            return False
        state = Machine(init_pid=init_pid).run("systemctl", "is-system-running", check=False)
        return state in {"running", "degraded"}
    return False


# systemd made a tree of groups in there; they can be removed, innermost first, once the processes are gone.
_REMOVE_CGROUP = """
mount -t cgroup2 cgroup2 "$1"
for attempt in $(seq 100); do
  find "$1/$2" -depth -type d -exec rmdir {} + 2>/dev/null
  [ ! -d "$1/$2" ] && exit
  sleep 0.05
done
exit 1
"""


def _remove_cgroup(cgroup: str) -> None:
    with tempfile.TemporaryDirectory() as mount_point:
        subprocess.run(
            ["unshare", "--mount", "--propagation=private", "sh", "-c", _REMOVE_CGROUP, "sh", mount_point, cgroup],
            check=True, stdin=subprocess.DEVNULL, timeout=30,
        )  # fmt: skip
