"""Makes tests/data/traces, what a launcher is told of real processes: `python -m tests.trainer.hangs.record [NAME...]`.

Each trace is of four ranks on two nodes (of the reference training: two ranks on one), each node with an agent's desk
in a process of its own, which is what a suspended job stops, too. One line is one beat, `[node, seconds, ranks]`.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.trainer.hangs.scenarios import ENV_RING, SAID_HUNG, SCENARIOS, Scenario
from trainer.agent.ranks import RankDesk, make_socket_folder
from trainer.contract import ENV_NODE_SOCKET, AttemptSpec, attempt_environment

TRACES = Path(__file__).parents[2] / "data" / "traces"
BEAT_S = 0.5
RANKS_PER_NODE = 2
AT_ONCE = 5
AFTER_HANG_S = 4.0  # beyond the scenario's bound

_EXAMPLE = ("--width=32", "--heads=2", "--layers=2", "--seq-len=32", "--log-every=1000")
EXAMPLES: Mapping[str, tuple[tuple[str, ...], ...]] = {  # arguments of each start, in the same run directory
    "example_from_start_to_end": ((*_EXAMPLE, "--steps=60", "--step-sleep=0.2", "--save-every-steps=15"),),
    "example_fast_steps": ((*_EXAMPLE, "--steps=400", "--save-every-steps=100"),),
    "example_saves_and_leaves": ((*_EXAMPLE, "--steps=80", "--step-sleep=0.2", "--stop-after=30"),),
    "example_restored": (
        (*_EXAMPLE, "--steps=60", "--stop-after=10"),
        (*_EXAMPLE, "--steps=60", "--step-sleep=0.2", "--save-every-steps=20"),
    ),
}


def main(names: Sequence[str]) -> None:
    """Record the named ones, or all."""
    wanted = names or [*SCENARIOS, *EXAMPLES]
    TRACES.mkdir(parents=True, exist_ok=True)
    slots = threading.Semaphore(AT_ONCE)
    threads = [threading.Thread(target=_record_one, args=(name, slots)) for name in wanted]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _record_one(name: str, slots: threading.Semaphore) -> None:
    with slots:
        head, beats = record_example(EXAMPLES[name]) if name in EXAMPLES else record_scenario(name, SCENARIOS[name])
        lines = [json.dumps({"name": name, **head}), *(json.dumps(beat, separators=(",", ":")) for beat in beats)]
        (TRACES / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
        print(f"{name}: {len(beats)} beats", flush=True)


# ---------------------------------------------------------------- the other processes


class Ring(threading.Thread):
    """Where the ranks of a scenario meet; knows when one said that it hangs now."""

    def __init__(self, world: int) -> None:
        super().__init__(daemon=True)
        self.hung_at: float | None = None
        self._world = world
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])

    def run(self) -> None:
        ranks = [self._listener.accept()[0] for _ in range(self._world)]
        here: set[int] = set()
        while True:
            for sock in select.select(ranks, [], [])[0]:
                data = sock.recv(16)
                if not data:
                    return
                if SAID_HUNG in data:
                    self.hung_at = time.monotonic()
                here |= {sock.fileno()} if b"." in data else set()
            if len(here) == self._world:
                here.clear()
                for sock in ranks:
                    sock.sendall(b".")


def serve_node(node: str, ranks: Sequence[int], command: Sequence[str], environment: Mapping[str, str]) -> None:
    """A node: its desk, its ranks, a beat on standard output twice a second until all ranks have ended."""
    desk = RankDesk(make_socket_folder() / "ranks.sock")
    desk.start()
    processes = [
        subprocess.Popen(
            list(command),
            env={
                **os.environ,
                **environment,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank % len(ranks)),
                ENV_NODE_SOCKET: str(desk.path),
            },
            stdout=subprocess.DEVNULL,
        )
        for rank in ranks
    ]
    while any(process.poll() is None for process in processes):
        print(json.dumps([node, time.monotonic(), desk.states()]), flush=True)
        time.sleep(BEAT_S)
    desk.close()


class Nodes:
    """The nodes of a recording: processes that can be stopped together with their ranks."""

    def __init__(
        self, placed: Mapping[str, Sequence[int]], command: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        self._beats: list[list[Any]] = []
        self.processes = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "tests.trainer.hangs.record",
                    "--node",
                    json.dumps([node, ranks, command, environment]),
                ],
                stdout=subprocess.PIPE,
                start_new_session=True,
                text=True,
            )
            for node, ranks in placed.items()
        ]
        self._readers = [threading.Thread(target=self._read, args=(process,)) for process in self.processes]
        for reader in self._readers:
            reader.start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        self._beats += [json.loads(line) for line in process.stdout]

    def stop(self, what: str, seconds: float) -> None:
        groups = [process.pid for process in self.processes]
        for number in (signal.SIGSTOP, signal.SIGCONT):
            if what == "job":
                for group in groups:
                    os.killpg(group, number)
            else:
                os.kill(groups[0], number)
            time.sleep(seconds if number is signal.SIGSTOP else 0)

    def end(self, *, kills: bool = False) -> list[list[Any]]:
        if kills:
            for process in self.processes:
                os.killpg(process.pid, signal.SIGKILL)
        for reader in self._readers:
            reader.join()
        return sorted(self._beats, key=lambda beat: float(beat[1]))


# ---------------------------------------------------------------- recordings


def record_scenario(name: str, scenario: Scenario) -> tuple[dict[str, Any], list[list[Any]]]:
    ring = Ring(2 * RANKS_PER_NODE)
    ring.start()
    command = [sys.executable, "-m", "tests.trainer.hangs.scenarios", name]
    nodes = Nodes({"n0": (0, 1), "n1": (2, 3)}, command, {ENV_RING: str(ring.port)})
    began = time.monotonic()
    if scenario.stopped is not None:
        what, at_s, for_s = scenario.stopped
        time.sleep(at_s)
        nodes.stop(what, for_s)
    if scenario.hung:
        while ring.hung_at is None:
            time.sleep(0.05)
        time.sleep(scenario.within_s + AFTER_HANG_S)
    beats = nodes.end(kills=scenario.hung)
    hung_s = round(ring.hung_at - began, 3) if ring.hung_at is not None else None
    head = {"nodes": ["n0", "n1"], "hung_s": hung_s, "rank": scenario.rank, "within_s": scenario.within_s}
    return head, _shorten(beats, began)


def record_example(starts: Sequence[Sequence[str]]) -> tuple[dict[str, Any], list[list[Any]]]:
    folder = Path(tempfile.mkdtemp())
    for number, arguments in enumerate(starts, start=1):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        spec = AttemptSpec(run="gpt", attempt=number, command=(), nodes=1, checkpoint_every_s=0)
        place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        command = [sys.executable, "-m", "trainer.example.train", *arguments]
        began = time.monotonic()
        environment = {**attempt_environment(spec, folder), **place, "OMP_NUM_THREADS": "1"}
        beats = Nodes({"n0": (0, 1)}, command, environment).end()
    shutil.rmtree(folder, ignore_errors=True)
    return {"nodes": ["n0"], "hung_s": None, "rank": None, "within_s": 0.0}, _shorten(beats, began)


def _shorten(beats: Sequence[Sequence[Any]], began: float) -> list[list[Any]]:
    left_out = ("pid", "timed_step", "timed", "step_s", "own_s")
    return [
        [node, round(at - began, 3), [{k: v for k, v in rank.items() if k not in left_out} for rank in ranks]]
        for node, at, ranks in beats
    ]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--node"]:
        serve_node(*json.loads(sys.argv[2]))
    else:
        main(sys.argv[1:])
