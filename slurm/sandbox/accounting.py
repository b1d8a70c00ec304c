"""Accounting for a sandbox: slurmdbd on a MariaDB of its own, both reachable from this machine only."""

from __future__ import annotations

import getpass
import os
import secrets
import shlex
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping

from slurm.sandbox.conf import render_slurmdbd_conf
from slurm.sandbox.installed import find_tool
from slurm.sandbox.processes import await_true, die_with_parent
from slurm.sandbox.spec import CLUSTER_NAME, SandboxError, SandboxSpec
from slurm.sandbox.wire import accepts, read_tail

_DEADLINE_S = 60.0
_DATABASE = "slurm_acct_db"


class Accounting:
    """A running database and the daemon before it."""

    def __init__(self, spec: SandboxSpec, *, env: Mapping[str, str], on_head: Callable[[list[str]], list[str]]) -> None:
        self._spec = spec
        self._env = dict(env)
        self._on_head = on_head  # wraps a command so that it runs under the head's name and address
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Database, daemon, and the cluster's entry in it; SandboxError with the end of the log that tells."""
        password = secrets.token_hex(16)
        self._start_database(password)
        conf = self._spec.root / "slurmdbd.conf"
        conf.touch(mode=0o600)
        conf.write_text(render_slurmdbd_conf(self._spec, database=_DATABASE, password=password))
        self.start_daemon()
        self._register()

    def stop(self) -> None:
        """End both and remove the database's files."""
        for name in reversed([*self._running]):
            self._kill(name)
        shutil.rmtree(self._spec.database, ignore_errors=True)

    # ---- the daemon alone

    def start_daemon(self) -> None:
        """slurmdbd, on the database that is there; nothing when it runs already."""
        if "slurmdbd" not in self._running:
            argv = self._on_head([find_tool("slurmdbd") or "slurmdbd", "-D"])
            self._launch("slurmdbd", argv, (self._spec.head_address, self._spec.dbd_port))

    def stop_daemon(self) -> None:
        """The daemon is gone at once; the database stays."""
        if "slurmdbd" in self._running:
            self._kill("slurmdbd")

    def freeze_daemon(self) -> None:
        """The daemon takes connections and answers nothing."""
        self._running["slurmdbd"].send_signal(signal.SIGSTOP)

    def thaw_daemon(self) -> None:
        """A frozen slurmdbd goes on."""
        self._running["slurmdbd"].send_signal(signal.SIGCONT)

    def _kill(self, name: str) -> None:
        process = self._running.pop(name)
        process.kill()
        process.wait(timeout=_DEADLINE_S)

    def _start_database(self, password: str) -> None:
        data = self._spec.database
        data.mkdir(mode=0o700)
        user = _unprivileged_user()
        if os.geteuid() == 0:
            shutil.chown(data, user)
        options = ["--no-defaults", f"--datadir={data}", f"--user={user}"]
        install = find_tool("mariadb-install-db") or "mariadb-install-db"
        log = self._spec.log("mariadb")
        with log.open("ab") as output:
            made = subprocess.run(
                [
                    install,
                    *options,
                    "--skip-test-db",
                    "--skip-name-resolve",
                    "--auth-root-authentication-method=normal",
                ],
                stdout=output,
                stderr=output,
                check=False,
                timeout=_DEADLINE_S,
                env=self._env,
            )
        if made.returncode != 0:
            raise SandboxError(f"the database could not be made: {read_tail(log)}")
        first = data / "first.sql"
        first.write_text(
            f"CREATE DATABASE {_DATABASE};\n"
            f"GRANT ALL ON {_DATABASE}.* TO 'slurm'@'127.0.0.1' IDENTIFIED BY '{password}';\n"
            "DROP USER IF EXISTS root@'127.0.0.1';\n"
        )
        if os.geteuid() == 0:
            shutil.chown(first, user)
        argv = [
            find_tool("mariadbd") or "mariadbd",
            *options,
            f"--init-file={first}",
            f"--port={self._spec.database_port}",
            *("--bind-address=127.0.0.1", "--skip-name-resolve", f"--socket={data}/socket", f"--pid-file={data}/pid"),
            "--innodb-flush-log-at-trx-commit=0",  # nobody needs a sandbox's accounts after a crash
        ]
        self._launch("mariadb", argv, ("127.0.0.1", self._spec.database_port))

    def _launch(self, name: str, argv: list[str], address: tuple[str, int]) -> None:
        log = self._spec.log(f"{name}-console")
        with log.open("ab") as output:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=self._env,
                cwd="/",
                start_new_session=True,
                preexec_fn=die_with_parent,  # noqa: PLW1509  (the keeper has one thread)
            )
        self._running[name] = process
        await_true(lambda: process.poll() is not None or accepts(address), deadline_s=_DEADLINE_S, every_s=0.05)
        if not accepts(address):
            raise SandboxError(f"{name} does not answer: {read_tail(log)}")

    def _register(self) -> None:
        argv = [find_tool("sacctmgr") or "sacctmgr", "-i", "add", "cluster", CLUSTER_NAME]
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=_DEADLINE_S, env=self._env)
        if done.returncode != 0:
            raise SandboxError(f"{shlex.join(argv)}: {done.stderr.strip() or done.stdout.strip()}")


def remove_database(spec: SandboxSpec) -> None:
    """Remove the database's files of a sandbox that is gone."""
    if spec.accounting:
        shutil.rmtree(spec.database, ignore_errors=True)


def _unprivileged_user() -> str:
    return "nobody" if os.geteuid() == 0 else getpass.getuser()
