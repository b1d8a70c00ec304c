"""Stands for the service: runs a run file's command here, as torchrun would, and starts it again. In threads."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import tomllib
from pathlib import Path
from typing import Any

from slurm.submitit_plugin import Answer


class Service:
    """Answers `supervisor submit`, `status` and `stop` for the runs that it was given."""

    def __init__(self) -> None:
        self._records: dict[str, dict[str, Any]] = {}
        self._processes: dict[str, list[subprocess.Popen[bytes]]] = {}
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    def ask(self, verb: str, *arguments: str, limit_s: float = 0) -> Answer:
        """In place of slurm.submitit_plugin.ask_service."""
        del limit_s
        words = [word for word in arguments if not word.startswith("--")]
        if verb == "submit":
            run = tomllib.loads(Path(words[0]).read_text())
            self._tell(run["name"], "pending")
            thread = threading.Thread(target=self._live, args=(run,), daemon=True)
            self._threads.append(thread)
            thread.start()
        elif verb == "status":
            runs = [self._records[name] for name in words or list(self._records)]
            return Answer(returncode=0, stdout=json.dumps({"runs": runs}))
        elif self._records[words[0]]["state"] in ("finished", "stopped"):
            return Answer(returncode=1, stderr="over already")
        else:
            self._tell(words[0], "stopped", end="stopped", reason="stopped by a person")
            self._kill(words[0])
        return Answer(returncode=0)

    def close(self) -> None:
        """Nothing of it stays behind."""
        for name in list(self._records):
            self._tell(name, "stopped")
            self._kill(name)
        for thread in self._threads:
            thread.join(10)

    def _tell(self, run: str, state: str, **more: Any) -> None:
        with self._lock:
            if not self._is_stopped(run):
                self._records[run] = {"run": run, "state": state, "end": None, "reason": None, **more}

    def _kill(self, run: str) -> None:
        for process in self._processes.get(run, []):
            process.kill()

    def _is_stopped(self, run: str) -> bool:
        return str(self._records.get(run, {}).get("state")) == "stopped"

    def _live(self, run: dict[str, Any]) -> None:
        name, failures, attempt = run["name"], 0, 0
        run_dir = Path(run["root"]) / name
        run_dir.mkdir()
        while not self._is_stopped(name):
            attempt += 1
            self._tell(name, "running", attempt=attempt)
            code = self._run_attempt(run, run_dir, attempt)
            failures += code not in (0, 75)
            limit = run.get("restart", {}).get("max_without_progress", 3)
            state = "finished" if code == 0 else "held" if code == 93 or failures >= limit else ""
            if state and not self._is_stopped(name):
                reason = f"exit code {code} of attempt {attempt}"
                self._tell(name, state, attempt=attempt, end="crashed", reason=reason)
                return

    def _run_attempt(self, run: dict[str, Any], run_dir: Path, attempt: int) -> int:
        attempt_dir = run_dir / "attempts" / str(attempt)
        attempt_dir.mkdir(parents=True)
        processes: list[subprocess.Popen[bytes]] = []
        self._processes[run["name"]] = processes
        for rank in range(run["nodes"]["max"] * run["nodes"]["procs_per_node"]):
            with (attempt_dir / f"{rank}.out").open("wb") as out, (attempt_dir / f"{rank}.err").open("wb") as err:
                environment = attempt_environment(run, run_dir, attempt, rank)
                processes.append(
                    subprocess.Popen(run["command"], cwd=run["workdir"], env=environment, stdout=out, stderr=err)
                )
        (attempt_dir / "pids").write_text(" ".join(str(process.pid) for process in processes))
        if self._is_stopped(run["name"]):
            self._kill(run["name"])
        codes = [process.wait() for process in processes]
        outcome = attempt_dir / "outcome.json"
        return int(json.loads(outcome.read_text())["exit_code"]) if outcome.exists() else max(codes, key=abs)


def attempt_environment(run: dict[str, Any], run_dir: Path, attempt: int, rank: int) -> dict[str, str]:
    """What torchrun and the launcher give to one process."""
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
