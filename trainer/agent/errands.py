"""What the launcher asks of a node besides training: evidence of its ranks, and failures made on purpose."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from trainer.agent.client import BeatClient
from trainer.agent.drills import Drill, hit_rank, parse_drill
from trainer.agent.evidence import collect_evidence
from trainer.agent.news import News
from trainer.agent.ranks import RankDesk
from trainer.agent.training import Training
from trainer.beats import Message

EVIDENCE_LIMIT_S = 5.0

_TICK_S = 0.05
_SAID_S = 0.2  # for the answer to leave before the node is mute


class Errands:
    """One node's errands; each kind one at a time."""

    def __init__(self, *, training: Training, desk: RankDesk, news: News, client: BeatClient, lost_s: float) -> None:
        """`lost_s`: a node that has been silent for so long is lost to the launcher."""
        self._training = training
        self._desk = desk
        self._news = news
        self._client = client
        self._lost_s = lost_s
        self._drills: set[str] = set()
        self._collector: threading.Thread | None = None

    def collect(self, order: Message) -> None:
        """Collect evidence beside everything else, and say which files there are."""
        if self._collector is not None and self._collector.is_alive():
            return
        launch, directory = int(order["launch"]), Path(str(order["dir"]))
        pids, log_dir = self._training.pids(), self._training.log_dir

        def collect() -> None:
            try:
                files = collect_evidence(directory, self._desk, pids, log_dir, EVIDENCE_LIMIT_S)
            except OSError as error:
                print(f"no evidence: {error}", file=sys.stderr, flush=True)
                files = []
            self._news.say({"type": "evidence", "launch": launch, "files": files})

        self._collector = threading.Thread(target=collect, name="evidence", daemon=True)
        self._collector.start()

    def make_drill(self, order: Message, is_told_to_end: Callable[[], bool]) -> bool:
        """Make a failure, each once; True when it was this node's end."""
        drill = parse_drill(order)
        if drill is None or drill.id in self._drills:
            return False
        self._drills.add(drill.id)
        if drill.kind in ("process", "hang"):
            detail = hit_rank(drill, self._training.pids())
            self._answer(drill, detail or "no such rank runs here", ok=bool(detail))
            return False
        self._answer(drill, f"this node is mute for {drill.for_s:g} s", ok=True)
        self._client.mute(drill.for_s, after_s=_SAID_S)
        if drill.kind == "network":
            return False
        self._play_dead(is_told_to_end)
        return True

    def _answer(self, drill: Drill, detail: str, *, ok: bool) -> None:
        if ok:
            self._news.note("drill.made")
        self._news.say({"type": "drilled", "id": drill.id, "ok": ok, "detail": detail})

    def _play_dead(self, is_told_to_end: Callable[[], bool]) -> None:
        """As a node without power: its ranks are gone at once, and nothing is heard of it any more.

        The process stays until the node counts as lost: the kernel would tell of its end, and a node without power
        has none.
        """
        self._training.stop(0.0)
        deadline = time.monotonic() + 2 * self._lost_s
        while time.monotonic() < deadline and not is_told_to_end():
            time.sleep(_TICK_S)
