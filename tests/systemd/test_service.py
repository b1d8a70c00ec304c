"""The service under a real systemd: started, watched, restarted when frozen, stopped."""

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.systemd.machine import Machine, booted_machine

SYSTEMD = Path(__file__).parents[2] / "systemd"
WATCHDOG_S = 3
CAP_CHOWN, CAP_KILL, CAP_SETGID, CAP_SETUID = 1 << 0, 1 << 5, 1 << 6, 1 << 7

pytestmark = pytest.mark.systemd

# Where the unit expects the service; the interpreter and the packages are those of this checkout.
COMMAND = """#!/bin/sh
PYTHONPATH=/opt/checkout PYTHONDONTWRITEBYTECODE=1 \
exec /opt/checkout/.venv/bin/python -P -c 'from supervisor.cli.main import main; main()' "$@"
"""

# As shipped, but for a shorter patience, and more frequent turns to go with it: the test should not wait a minute.
IMPATIENT = f"""[Service]
WatchdogSec={WATCHDOG_S}
RestartSec=100ms
"""
SETTINGS = """[loop]
idle_interval_s = 1
"""


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    units = tmp_path_factory.mktemp("units")
    shutil.copy(SYSTEMD / "supervisor.service", units)
    drop_ins = units / "supervisor.service.d"
    drop_ins.mkdir()
    (drop_ins / "impatient.conf").write_text(IMPATIENT)
    shutil.copy(SYSTEMD / "run-directories.conf", drop_ins)
    with booted_machine(units) as machine:
        machine.install("/opt/slurm-supervisor/bin/supervisor", COMMAND, mode="755")
        machine.install("/etc/supervisor/supervisor.toml", SETTINGS)
        machine.install("/etc/sysusers.d/supervisor.conf", (SYSTEMD / "sysusers.d" / "supervisor.conf").read_text())
        machine.run("systemd-sysusers")
        yield machine


@pytest.fixture
def service(machine: Machine) -> Iterator[Machine]:
    machine.run("systemctl", "start", "supervisor.service", check=False)
    assert machine.show("ActiveState") == "active", machine.journal()
    yield machine
    machine.run("systemctl", "stop", "supervisor.service")


def process_status(machine: Machine) -> dict[str, str]:
    status = machine.run("cat", f"/proc/{machine.show('MainPID')}/status")
    return dict(line.split(":\t", 1) for line in status.splitlines())


def test_starting_waits_until_the_daemon_says_that_it_is_ready(service: Machine) -> None:
    assert (service.show("ActiveState"), service.show("SubState")) == ("active", "running")


def test_a_slurm_that_does_not_answer_is_said_in_the_status_and_waited_for(service: Machine) -> None:
    service.wait_until("the status says it", lambda: "Slurm does not answer" in service.show("StatusText"))
    assert service.show("ActiveState") == "active"


def test_the_daemon_runs_as_its_own_account_without_capabilities(service: Machine) -> None:
    fields = process_status(service)
    assert fields["Uid"].split()[0] == service.run("id", "-u", "supervisor") != "0"
    assert int(fields["CapBnd"], 16) == 0


def test_what_the_guide_asks_tells_a_folder_that_is_named_from_one_that_was_forgotten(machine: Machine) -> None:
    machine.run("mkdir", "-p", "/shared/runs", "/shared/forgotten")
    machine.run("chown", "supervisor", "/shared/runs", "/shared/forgotten")
    machine.run("systemctl", "restart", "supervisor.service")  # what is named is looked for at the start
    guide = (SYSTEMD.parent / "docs" / "service.md").read_text()
    question = "\n".join(line for line in guide.splitlines() if line.startswith(("pid=", "nsenter ")))
    try:
        assert machine.run("sh", "-c", question, check=False) == "ok"
        assert machine.run("sh", "-c", question.replace("/shared/runs", "/shared/forgotten"), check=False) == ""
    finally:
        machine.run("systemctl", "stop", "supervisor.service")


def test_in_root_mode_it_keeps_only_the_rights_to_become_a_runs_owner(machine: Machine) -> None:
    drop_in = "/etc/systemd/system/supervisor.service.d/root-mode.conf"
    machine.run("rm", "-rf", "/var/lib/supervisor")  # a ledger that the account has made keeps its mode
    machine.install(drop_in, (SYSTEMD / "root-mode.conf").read_text())
    machine.run("systemctl", "daemon-reload")
    try:
        machine.run("systemctl", "start", "supervisor.service", check=False)
        assert machine.show("ActiveState") == "active", machine.journal()
        fields = process_status(machine)
        assert fields["Uid"].split()[0] == "0"
        assert int(fields["CapBnd"], 16) == CAP_CHOWN | CAP_KILL | CAP_SETGID | CAP_SETUID
        anybody = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
        for name in ("ledger.db", "ledger.db-wal", "ledger.db-shm"):
            machine.run(*anybody, "test", "-r", f"/var/lib/supervisor/{name}")
            machine.run(*anybody, "test", "!", "-w", f"/var/lib/supervisor/{name}")
        machine.run(*anybody, "test", "!", "-r", "/var/lib/supervisor")  # through, and not in
    finally:
        machine.run("systemctl", "stop", "supervisor.service")
        machine.run("rm", drop_in)
        # What root made, the account could not write to.
        machine.run("rm", "-rf", "/var/lib/supervisor")
        machine.run("systemctl", "daemon-reload")


# What the daemon's children do before they are a person's sbatch or read a checkpoint back.
CHILD = """
import os, resource, signal, subprocess, sys
for limit in (resource.RLIMIT_CORE, resource.RLIMIT_NOFILE):
    soft, hard = resource.getrlimit(limit)
    resource.setrlimit(limit, (hard, hard))
    assert soft != hard
os.nice(10)
if os.geteuid() == 0:
    child = subprocess.Popen(["sleep", "60"], user=65534, group=65534, extra_groups=[])
    child.kill()
    child.wait()
"""


@pytest.mark.parametrize("drop_ins", [[], ["root-mode.conf"]], ids=["one account", "root mode"])
def test_its_children_may_take_a_persons_limits_read_with_low_priority_and_be_killed(
    machine: Machine, drop_ins: list[str]
) -> None:
    lines = [line for name in ("supervisor.service", *drop_ins) for line in (SYSTEMD / name).read_text().splitlines()]
    kept = ("User=", "Group=", "SystemCall", "CapabilityBounding", "NoNewPrivileges=", "Limit")
    settings = [f"--property={line}" for line in lines if line.startswith(kept)]
    machine.run("install", "-D", "--mode=644", "/dev/stdin", "/opt/child.py", stdin=CHILD)
    machine.run(
        "systemd-run", "--wait", "--pipe", "--quiet", *settings, "/opt/checkout/.venv/bin/python", "/opt/child.py"
    )


def test_a_daemon_at_work_is_left_alone_by_the_watchdog(service: Machine) -> None:
    pid, until = service.show("MainPID"), time.monotonic() + 1.5 * WATCHDOG_S
    service.wait_until("more than one watchdog period has passed", lambda: time.monotonic() > until)
    assert service.show("MainPID") == pid
    assert service.show("ActiveState") == "active"


def test_a_frozen_daemon_is_replaced(service: Machine) -> None:
    frozen = service.show("MainPID")
    service.run("kill", "-STOP", frozen)
    service.wait_until(
        "another daemon is ready",
        lambda: service.show("MainPID") not in {"0", frozen} and service.show("ActiveState") == "active",
    )
    journal = service.journal().lower()
    assert "watchdog" in journal
    assert "most recent call first" in journal  # what the frozen daemon was doing is kept


def test_a_killed_daemon_is_replaced(service: Machine) -> None:
    killed = service.show("MainPID")
    service.run("kill", "-KILL", killed)
    service.wait_until(
        "another daemon is ready",
        lambda: service.show("MainPID") not in {"0", killed} and service.show("ActiveState") == "active",
    )


def test_stopping_is_quick_and_clean(service: Machine) -> None:
    before = time.monotonic()
    service.run("systemctl", "stop", "supervisor.service")
    assert time.monotonic() - before < 10
    assert (service.show("ActiveState"), service.show("Result")) == ("inactive", "success")


def test_a_mistake_in_the_configuration_is_not_tried_again_and_again(machine: Machine) -> None:
    good = machine.run("cat", "/etc/supervisor/supervisor.toml")
    machine.install("/etc/supervisor/supervisor.toml", "no_such_key = 1\n")
    try:
        machine.run("systemctl", "start", "supervisor.service", check=False)
        assert machine.show("ActiveState") == "failed"
        assert machine.show("ExecMainStatus") == "2"
        assert "no_such_key" in machine.journal()
    finally:
        machine.install("/etc/supervisor/supervisor.toml", good)
        machine.run("systemctl", "reset-failed", "supervisor.service")
