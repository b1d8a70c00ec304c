"""Rules about Slurm's silence: it is waited out, and after some minutes a person should know. Pure."""

from __future__ import annotations

from supervisor.core.draft import Draft
from supervisor.model import Stale

TELL_AFTER_S = 300.0


def tell_silence(draft: Draft) -> None:
    """Tell someone, once per outage, that Slurm has not answered for minutes: meanwhile nothing is started or ended."""
    for what, source in (("jobs", draft.snapshot.jobs), ("nodes", draft.snapshot.nodes)):
        if not isinstance(source, Stale) or not draft.world.runs:
            continue
        silent_s = (draft.now - source.since_at).total_seconds()
        if silent_s >= TELL_AFTER_S:
            text = f"Slurm has not answered for {silent_s / 60:.0f} min ({what}): {source.why}"
            draft.tell(f"slurm-silent:{source.since_at:%s}", text)
            return
