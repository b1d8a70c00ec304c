"""Stands for the `supervisor` command: runs a run file's command here, as torchrun would, and starts it again.

`service.py DIRECTORY submit|status|stop ...`. One JSON file per run in the directory.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any


def write(path: Path, record: dict[str, Any]) -> None:
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(record))
    temporary.replace(path)


def attempt_environment(run: dict[str, Any], run_dir: Path, attempt: int, rank: int) -> dict[str, str]:
    nodes, local = run["nodes"]["max"], run["nodes"]["procs_per_node"]
    saves = sorted(run_dir.glob("checkpoints/step-*.a*/MANIFEST.json"))
    return {
        **{name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ},
        "RANK": str(rank),
        "WORLD_SIZE": str(nodes * local),
        "LOCAL_RANK": str(rank % local),
        "LOCAL_WORLD_SIZE": str(local),
        "GROUP_RANK": str(rank // local),
        "GROUP_WORLD_SIZE": str(nodes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "x",
        "SLURM_JOB_NODELIST": f"n[1-{nodes}]" if nodes > 1 else "n1",
        "SLURM_PROCID": "0",
        "SLURM_NTASKS": str(nodes),
        "SLURM_CPUS_PER_TASK": "8",
        "SUPERVISOR_RUN": run["name"],
        "SUPERVISOR_RUN_DIR": str(run_dir),
        "SUPERVISOR_ATTEMPT": str(attempt),
        "SUPERVISOR_RESUME_STEP": saves[-1].parent.name.split(".")[0].removeprefix("step-") if saves else "0",
        "SUPERVISOR_RESUME_FROM": str(saves[-1].parent) if saves else "",
    }


def run_attempt(run: dict[str, Any], run_dir: Path, attempt: int) -> int:
    attempt_dir = run_dir / "attempts" / str(attempt)
    attempt_dir.mkdir(parents=True)
    processes = []
    for rank in range(run["nodes"]["max"] * run["nodes"]["procs_per_node"]):
        with (attempt_dir / f"{rank}.out").open("wb") as out, (attempt_dir / f"{rank}.err").open("wb") as err:
            processes.append(
                subprocess.Popen(
                    run["command"],
                    cwd=run["workdir"],
                    env=attempt_environment(run, run_dir, attempt, rank),
                    stdout=out,
                    stderr=err,
                )
            )
    (attempt_dir / "pids").write_text(" ".join(str(process.pid) for process in processes))
    codes = [process.wait() for process in processes]
    outcome = attempt_dir / "outcome.json"
    return json.loads(outcome.read_text())["exit_code"] if outcome.exists() else max(codes, key=abs)


def run_all(record: Path, run_file: Path) -> None:
    """The run's whole life."""
    run = tomllib.loads(run_file.read_text())
    run_dir = Path(run["root"]) / run["name"]
    run_dir.mkdir()
    failures, attempt = 0, 0
    while True:
        attempt += 1
        write(record, {"run": run["name"], "state": "running", "attempt": attempt, "end": None, "reason": None})
        code = run_attempt(run, run_dir, attempt)
        failures += code not in (0, 75)
        limit = run.get("restart", {}).get("max_without_progress", 3)
        state = "finished" if code == 0 else "held" if code == 93 or failures >= limit else ""
        if state:
            reason = f"exit code {code} of attempt {attempt}"
            write(record, {"run": run["name"], "state": state, "attempt": attempt, "end": "crashed", "reason": reason})
            return


def main(directory: Path, verb: str, *arguments: str) -> int:
    words = [word for word in arguments if not word.startswith("--")]
    if verb == "submit":
        run_file = Path(words[0])
        record = directory / f"{tomllib.loads(run_file.read_text())['name']}.json"
        write(record, {"run": record.stem, "state": "pending"})
        life = subprocess.Popen(
            [sys.executable, __file__, str(directory), "live", str(record), str(run_file)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        record.with_suffix(".pid").write_text(str(life.pid))
    elif verb == "live":
        run_all(Path(words[0]), Path(words[1]))
    elif verb == "status":
        files = [directory / f"{words[0]}.json"] if words else sorted(directory.glob("*.json"))
        print(json.dumps({"runs": [json.loads(file.read_text()) for file in files]}))
    elif verb == "stop":
        record = directory / f"{words[0]}.json"
        if json.loads(record.read_text())["state"] in ("finished", "stopped"):
            print("over already", file=sys.stderr)
            return 1
        os.killpg(int(record.with_suffix(".pid").read_text()), signal.SIGKILL)
        write(record, {"run": words[0], "state": "stopped", "end": "stopped", "reason": "stopped by a person"})
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
