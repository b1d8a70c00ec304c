"""Which place each node has in the current start: the go."""

from __future__ import annotations

from trainer.contract import AttemptSpec
from trainer.launching.fleet import Fleet
from trainer.launching.state import State
from trainer.launching.training import Training


class Places:
    """Tells the nodes their places."""

    def __init__(self, spec: AttemptSpec, job_id: int, state: State, fleet: Fleet) -> None:
        self._spec = spec
        self._job_id = job_id
        self._state = state
        self._fleet = fleet

    def tell(self, name: str) -> None:
        """Send a node its place, or that it is a spare; also when it is back."""
        training, node = self._state.training, self._fleet.nodes[name]
        if training is None or node.end is not None or node.lost:
            return
        if name not in training.nodes:
            if not node.failed:
                self._fleet.send(name, {"type": "spare"})
            return
        is_held_back = self._spec.worker_start == "torchrun" and name != training.nodes[0] and not training.is_open
        if is_held_back:
            return
        master = self._fleet.nodes[training.nodes[0]]
        self._fleet.send(
            name,
            {
                "type": "go",
                "launch": training.launch,
                "rank": training.nodes.index(name),
                "nodes": len(training.nodes),
                "master_addr": master.address,
                "master_port": master.port,
                "rdzv_id": self.rdzv_id(training),
                "resume_from": training.point.path,
                "resume_step": training.point.step,
            },
        )

    def rdzv_id(self, training: Training) -> str:
        """What tells the ranks of one start from those of any other."""
        return f"{self._job_id}.{self._spec.attempt}.{training.launch}"
