"""Who may see what and change what: everybody sees all runs, and changes their own."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from slurm.errors import SlurmRefused
from slurm.types import Identity
from tests.users.conftest import Service

pytestmark = pytest.mark.slurm

SECRET = "hunter2-of-a"

WAITS = """\
#!/bin/bash
#SUPERVISE --backoff-s=0
until [ -e "end.$SUPERVISOR_ATTEMPT" ]; do sleep 0.1; done
exit $(cat "end.$SUPERVISOR_ATTEMPT")
"""


def test_everybody_sees_a_run_and_only_its_owner_root_and_the_admins_change_it(service: Service) -> None:
    stage, a, b = service.stage, service.a, service.b
    a.write("waits.sh", WAITS)
    ended = a.supervisor("sbatch", "--parsable", "--supervise-name=hers", "waits.sh", API_KEY=SECRET)
    assert ended.returncode == 0, ended.stderr
    job_id = ended.stdout.strip()
    seen = b.supervisor("status", "--json")
    assert "hers" in {run["run"] for run in json.loads(seen.stdout)["runs"]}, seen.stderr
    said = seen.stdout + b.supervisor("history", "hers", "--json").stdout
    assert SECRET not in said
    assert b.run("grep", "-rlsF", SECRET, str(stage.directory)).stdout == ""  # in nothing that b may read
    assert b.run("cat", str(stage.directory / "submissions/hers.json")).returncode == 1
    assert [b.run("ls", str(stage.directory / name)).returncode for name in ("submissions", "batch")] == [2, 2]

    for words in (("stop", "hers"), ("pause", "hers"), ("resume", "hers"), ("release", "hers"), ("pause",)):
        refused = b.supervisor(*words)
        assert refused.returncode == 4, refused
        assert f"{b.name} may not {words[0]} " in refused.stderr
        assert "the admin group may" in refused.stderr
    stolen = b.supervisor("adopt", job_id)
    assert (stolen.returncode, f"belongs to {a.name}" in stolen.stderr) == (4, True), stolen.stderr
    with pytest.raises(SlurmRefused):
        stage.slurm.cancel(int(job_id), Identity(uid=b.uid, gid=b.gid))

    assert b.supervisor("pause", "hers", groups=(service.admin_gid,)).returncode == 0
    assert stage.run("hers").is_paused
    assert stage.supervisor("resume", "hers").returncode == 0
    assert a.supervisor("stop", "hers").returncode == 0
    stage.await_state("stopped", "hers")


def test_a_run_that_an_admin_did_not_make_is_not_handed_another_script(service: Service) -> None:
    """What comes with `adopt` runs as the job's owner: of an admin who is not root it is not taken."""
    stage, a, b = service.stage, service.a, service.b
    job_id = a.run("sbatch", "--parsable", "--wrap=sleep 60").stdout.strip()
    code = _RAW.format(verb="adopt", more=f', "job_id": {job_id}, "waited_s": 1')
    b.write("evil.sh", "#!/bin/bash\nid -u >/tmp/evil\n")
    socket = str(stage.directory / "control.sock")

    def answered() -> str:
        said = b.run(str(b.python), "-P", "-s", "-c", code, socket, "evil.sh", groups=(service.admin_gid,)).stdout
        return "" if said.startswith(("look_again", "unknown_job")) else said

    assert f"belongs to {a.name}" in stage.wait("an answer of Slurm", answered)
    assert a.run("scancel", job_id).returncode == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_ledger_is_read_without_a_daemon_too(service: Service, number: signal.Signals) -> None:
    stage, b = service.stage, service.b
    service.end(number)
    try:
        seen = b.supervisor("status")
        assert (seen.returncode, seen.stderr) == (0, ""), seen
        assert b.run("test", "-w", str(stage.directory / "ledger.db")).returncode == 1
        refused = b.supervisor("stop", "nothing")
        assert (refused.returncode, "is not running" in refused.stderr) == (3, True)
    finally:
        stage.start_daemon()


_RAW = """
import json, sys
from pathlib import Path
from supervisor.cli.sbatch import read_handed_in, request_of
from supervisor.control import Refused, ask
body = request_of("{verb}", read_handed_in(tuple(sys.argv[2:])))
try:
    print(json.dumps(ask(Path(sys.argv[1]), {{**body{more}}})))
except Refused as error:
    print(error.code, error)
"""


# ---------------------------------------------------------------- names that lead to what is another's


def test_no_name_in_a_request_shows_what_its_owner_may_not_read(service: Service, tmp_path: Path) -> None:
    stage, a, b = service.stage, service.a, service.b
    secret = b.write("private/secret", "only b knows that the answer is 4711\n")
    secret.chmod(0o600)
    roots = tmp_path / "roots"
    roots.write_text("only root knows that the answer is 0815\n")
    roots.chmod(0o600)
    a.write("waits.sh", WAITS)
    (a.home / "to-root.sh").symlink_to("/etc/shadow")
    for words in (["to-root.sh"], [str(secret)]):
        unread = a.supervisor("sbatch", *words)
        assert (unread.returncode, "Unable to open file" in unread.stderr) == (1, True), unread
    for option in (f"checkpoint-dir={b.home}/private", f"root={a.home}/../{b.home.name}/x"):
        refused = a.supervisor("sbatch", f"--supervise-{option}", "waits.sh")
        assert (refused.returncode, "ermission denied" in refused.stderr) == (2, True), refused

    # The same without the command, which checks as the person: the daemon opens nothing with more than their rights.
    a.write("end.1", "1")
    (a.home / "link.log").symlink_to(roots)
    code, socket = _RAW.format(verb="sbatch", more=""), str(stage.directory / "control.sock")
    tries = {
        "log-of-root": [f"--output=../../../../../..{roots}"],
        "log-of-b": [f"--output={secret}"],
        "log-link": ["--output=link.log"],
        "root-of-b": [f"--supervise-root={a.home}/../{b.home.name}/private"],
        "saves-of-b": [f"--supervise-checkpoint-dir={b.home}/private", "--supervise-layout=dcp"],
        "plain-b": [f"--chdir={b.home}/private"],
    }
    for name, words in tries.items():
        options = [f"--supervise-name={name}", "--supervise-max-restarts=1", *words, "waits.sh"]
        asked = a.run(str(a.python), "-P", "-s", "-c", code, socket, *options)
        assert json.loads(asked.stdout)["ok"], asked
    stage.wait("the ends of two", lambda: all(stage.run(n).state == "held" for n in ("log-of-root", "log-link")), 60)
    for name in tries:
        assert a.supervisor("stop", name).returncode in {0, 4}
    told = "".join(b.supervisor("history", name, "--json", "--evidence").stdout for name in tries)
    for text in (told, stage.daemon_log.read_text()):
        assert not {"4711", "0815"} & set(text.replace("\\n", " ").split())
    for path in stage.directory.glob("ledger.db*"):
        assert b"only b knows" not in path.read_bytes()
        assert b"only root knows" not in path.read_bytes()
    assert sorted(p.name for p in (b.home / "private").iterdir()) == ["secret"]
    stage.wait("the end of all", lambda: all(stage.run(name).state in {"stopped", "held"} for name in tries))
