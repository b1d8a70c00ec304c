"""What `supervisor doctor` says of Slurm: its tools, its forms, its accounting, and what we may do there.

Looking changes nothing and leaves no line in a log: slurmctld notes a drain that is tried without the right as a
security violation, so rights are read, not tried.
"""

from __future__ import annotations

import os
import pwd
import re
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from slurm import commands
from slurm.client import CliClient
from slurm.errors import SlurmError, SlurmRefused
from slurm.failures import is_no_accounting
from slurm.run_as import run_as
from slurm.run_tool import Completed, run_tool
from slurm.submitted import read_release
from slurm.types import ClusterFacts, Identity
from supervisor.accounts import user_name
from supervisor.cli.findings import Finding, warning
from supervisor.config import Settings

TOOLS = ("sbatch", "scontrol", "squeue", "scancel")
_TIMEOUT_S = 5.0
_NOBODY = 65534
_SHORT_MEMORY_S = 60

Ask = Callable[[commands.Argv], Completed]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What the looks need. `ask` runs a reading command; a tool that is not there has no answer and exit code None."""

    settings: Settings
    ask: Ask
    client: CliClient
    json_client: CliClient
    notices: list[str] = field(default_factory=list)  # of `json_client`: why JSON was given up
    parent: Mapping[str, str] = field(default_factory=dict)  # PATH and SLURM_CONF are of it
    uid: int = 0
    service_uid: int | None = None  # of a service that another account runs; None: there is none

    @property
    def account(self) -> int:
        """Whose rights count: the service's, else those of whoever asks."""
        return self.uid if self.service_uid is None else self.service_uid


def make_bench(settings: Settings) -> Bench:
    """On the cluster that the settings name, as whoever runs the command."""
    parent = {**os.environ, **({"SLURM_CONF": str(settings.slurm.conf)} if settings.slurm.conf else {})}
    notices: list[str] = []

    def ask(argv: commands.Argv) -> Completed:
        try:
            return run_tool(argv, _TIMEOUT_S, commands.reading_environment(parent))
        except OSError as error:
            return Completed(returncode=None, stderr=str(error))

    return Bench(
        settings=settings,
        ask=ask,
        client=CliClient(timeout_s=_TIMEOUT_S, parent=parent),
        json_client=CliClient(timeout_s=_TIMEOUT_S, parent=parent, form="json", on_notice=notices.append),
        notices=notices,
        parent=parent,
        uid=os.geteuid(),
        service_uid=_find_service_uid(settings.control.socket, os.geteuid()),
    )


def look_at_slurm(bench: Bench) -> tuple[Finding, ...]:
    """All findings; what needs an answer of the controller is left out where there is none."""
    try:
        facts = bench.client.fetch_cluster()
    except SlurmError as error:
        return (Finding(what="slurm", ok=False, detail=" ".join(str(error).split())),)
    accounting = "with accounting" if facts.has_accounting else "without accounting"
    return (
        Finding(what="slurm", ok=True, detail=f"{facts.version}, cluster {facts.cluster}, {accounting}"),
        look_at_tools(bench, facts),
        look_at_json(bench),
        look_at_accounting(bench, facts),
        look_at_drains(bench),
        look_at_accounts(bench),
    )


# ---------------------------------------------------------------- the tools


def look_at_tools(bench: Bench, facts: ClusterFacts) -> Finding:
    """Whether the commands on PATH are of the controller's release: another one's may say less, or be turned away."""
    what = "slurm tools"
    said = {tool: bench.ask((tool, "--version")) for tool in TOOLS}
    releases = {tool: read_release(done.stdout.rpartition(" ")[2].strip()) for tool, done in said.items()}
    missing = [tool for tool, release in releases.items() if release is None]
    if missing:
        detail = f"{', '.join(missing)}: not on PATH, or without a version; install Slurm's client commands"
        return Finding(what=what, ok=False, detail=detail)
    controller = read_release(facts.version)
    other = {tool: release for tool, release in releases.items() if release is not None and release != controller}
    if controller is None or not other:
        return Finding(what=what, ok=True, detail=f"{', '.join(TOOLS)} are of release {facts.version}")
    named = ", ".join(f"{tool} is {year}.{month:02d}" for tool, (year, month) in other.items())
    if any(release > controller for release in other.values()):
        detail = f"{named}, newer than the controller ({facts.version}), which may turn them away: use its own"
        return Finding(what=what, ok=False, detail=detail)
    return warning(what, f"{named}, older than the controller ({facts.version}): they may show less; use its own")


def look_at_json(bench: Bench) -> Finding:
    """Whether jobs can be read as JSON; without it text is read, which says as much."""
    what = "slurm json"
    try:
        listing = bench.json_client.fetch_jobs()
    except SlurmError as error:
        return warning(what, f"no answer: {' '.join(str(error).split())}")
    if bench.notices:
        said = " ".join(bench.notices)
        if bench.settings.slurm.form == "json":
            return warning(what, f'{said}; set [slurm] form = "text"')
        return Finding(what=what, ok=None, detail=f"{said}; text is what is configured")
    return Finding(
        what=what, ok=True, detail=f"usable, {len(listing.jobs)} jobs; configured: {bench.settings.slurm.form}"
    )


# ---------------------------------------------------------------- accounting


def look_at_accounting(bench: Bench, facts: ClusterFacts) -> Finding:
    """Whether there is accounting, whether it answers, and what is missing without it."""
    what = "slurm accounting"
    if not facts.has_accounting:
        age_s = facts.min_job_age_s or 0
        short = f" MinJobAge is {age_s} s: raise it to 300." if age_s < _SHORT_MEMORY_S else ""
        return warning(
            what,
            f"none. The end of a job that the controller has forgotten (MinJobAge, {age_s} s) is then known only by "
            f"what it left, and `supervisor adopt` may have to be told the arguments.{short} slurmdbd would know both",
        )
    try:
        bench.client.fetch_ended_jobs(since=datetime.now(UTC))
    except SlurmRefused as error:
        if not is_no_accounting(error):
            return warning(what, f"sacct is refused: {' '.join(str(error).split())}")
        return warning(what, "configured, and sacct finds none: look at AccountingStorageType on this host")
    except SlurmError as error:
        return warning(what, f"it does not answer; ends of forgotten jobs wait for it: {' '.join(str(error).split())}")
    return Finding(what=what, ok=True, detail="it answers")


# ---------------------------------------------------------------- rights

_SLURM_USER = re.compile(r"^SlurmUser\s*=\s*\S+\((\d{1,10})\)", re.MULTILINE)


def _find_service_uid(socket: Path, uid: int) -> int | None:
    """The account of the service whose socket this is, where it is another than `uid`."""
    try:
        owner = socket.stat().st_uid
    except OSError:
        return None
    return owner if uid not in {owner, 0} else None


def look_at_drains(bench: Bench) -> Finding:
    """Whether the account that drains may drain nodes, by what Slurm says of it."""
    what = "drains"
    if not bench.settings.drain.enabled or bench.settings.observe_only:
        return Finding(what=what, ok=None, detail="turned off in the configuration: broken nodes are only left out")
    name = user_name(bench.account)
    slurm_user = _SLURM_USER.search(bench.ask(commands.show_config_argv()).stdout)
    if bench.account == 0 or (slurm_user is not None and int(slurm_user[1]) == bench.account):
        return Finding(what=what, ok=True, detail=f"{name} may drain nodes")
    if "administrator" in bench.ask(commands.admin_level_argv(name)).stdout.lower():
        return Finding(what=what, ok=True, detail=f"{name} is a Slurm administrator, and may drain nodes")
    return warning(
        what,
        f"{name} is neither root nor SlurmUser nor a Slurm administrator: broken nodes are left out of our own jobs "
        f"and not drained. To let it: sacctmgr modify user {name} set adminlevel=Administrator; else "
        "[drain] enabled = false",
    )


def look_at_accounts(bench: Bench) -> Finding:
    """Whether jobs can be submitted as their owners: root can, where a process may change its account."""
    what = "accounts"
    if bench.uid != 0 and bench.account == 0:
        return Finding(what=what, ok=True, detail="the service runs as root, and submits each job as its owner")
    if bench.uid != 0:
        detail = (
            f"jobs run as {user_name(bench.account)} alone, and others' runs are refused; a daemon of root serves all"
        )
        return Finding(what=what, ok=None, detail=detail)
    cure = "start the service with CAP_SETUID and CAP_SETGID (systemd: CapabilityBoundingSet)"
    try:
        done = run_as(
            ("sbatch", "--version"),
            _TIMEOUT_S,
            commands.reading_environment(bench.parent),
            identity=Identity(uid=_find_somebody(), gid=_NOBODY),
            directory=None,
        )
    except (OSError, SlurmRefused) as error:
        return Finding(what=what, ok=False, detail=f"sbatch can't be run as another account: {error}; {cure}")
    if done.returncode != 0:
        said = " ".join(done.stderr.split())[:200]
        return Finding(what=what, ok=False, detail=f"sbatch fails as another account: {said}; can all read slurm.conf?")
    return Finding(what=what, ok=True, detail="sbatch can be run as the owner of a run")


def _find_somebody() -> int:
    try:
        return pwd.getpwnam("nobody").pw_uid
    except KeyError:
        return _NOBODY


# ---------------------------------------------------------------- what is kept

_MODES: Mapping[str, int] = {"submissions": 0o700, "batch": 0o711}


def look_at_submissions(ledger: Path, *, uid: int) -> Finding:
    """Whether kept scripts and environments, which hold secrets, are the service's alone."""
    what = "submissions"
    faults = []
    for name, mode in _MODES.items():
        folder = ledger.parent / name
        try:
            found = folder.lstat()
        except FileNotFoundError:
            continue
        except OSError as error:
            return Finding(
                what=what, ok=None, detail=f"{folder}: {error.strerror}: only the service's account can look"
            )
        if not stat.S_ISDIR(found.st_mode):
            faults.append(f"{folder} is no folder: move it away")
        elif found.st_uid != uid and uid == 0:
            faults.append(f"{folder} belongs to {user_name(found.st_uid)}: chown {user_name(uid)} {folder}")
        elif stat.S_IMODE(found.st_mode) != mode:
            faults.append(f"{folder} has mode {stat.S_IMODE(found.st_mode):04o}: chmod {mode:04o} {folder}")
    kept = ledger.parent / "submissions"
    try:
        files = sorted(kept.glob("*.json")) if os.access(kept, os.R_OK | os.X_OK) else []
    except OSError:
        files = []
    loose = [path for path in files if stat.S_IMODE(path.lstat().st_mode) & 0o077]
    faults += [f"{path} can be read by others: chmod 0600 {path}" for path in loose[:3]]
    if faults:
        return Finding(what=what, ok=False, detail="; ".join(faults))
    return Finding(what=what, ok=True, detail=f"{kept}: {len(files)} kept" if kept.is_dir() else "nothing is kept yet")
