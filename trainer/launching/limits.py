"""How long the launcher waits for what."""

from __future__ import annotations

from dataclasses import dataclass

REPORT_INTERVAL_S = 1.0
OWN_SILENCE_S = 1.0  # a cycle takes a tenth of this
POLL_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long the launcher waits, in seconds."""

    connect_s: float = 60.0  # for srun, a cold Python and a busy file system on a large job; the node is then silent
    checks_margin_s: float = 5.0  # beyond the checks' own deadline
    spare_grace_s: float = 1.0  # once enough nodes are healthy, the others may still be picked for this long
    peer_grace_s: float = 5.0  # after the first failure the others may end by themselves, with their own evidence
    silent_s: float = 60.0  # a silent node that nobody acted upon ends the step
    kill_s: float = 6.0  # for the nodes to kill their ranks and say so
    step_end_s: float = 5.0  # for srun to end after its nodes did
    # slurmstepd tells srun how its task ended. When nobody listens it tries again for 2 s, and its node stays
    # COMPLETING for as long: the next attempt would wait for it.
    last_word_s: float = 0.5
    # ---- of a recovery inside the allocation
    begin_s: float = 120.0  # from the order to begin until a node says that it has
    closed_s: float = 1.5  # an agent whose connection broke is back by then, if it lives
    evidence_s: float = 5.0  # for the nodes to collect what a hang leaves
    respawn_s: float = 20.0  # for a new agent on a node whose agent was killed
    fence_s: float = 3.0  # for that agent's word that nothing of the old start is left there, before others begin
    return_s: float = 3.0  # for a node that was lost and is connected again to say that its ranks are stopped
    resume_s: float = (
        5.0  # for the run directory to say which checkpoint is the newest; the last known one is then taken
    )
    cut_off_s: float = 60.0  # so long after the loss of a node its own word that it lives still amends the record
