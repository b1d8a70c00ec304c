"""Rules about copies to object storage: someone is told when they fail; a training goes on without them. Pure."""

from __future__ import annotations

from supervisor.core.draft import Draft

TOLD_AFTER = 3  # failed tries in a row: storage says no now and then
_FAILING = "copies to object storage fail: "


def tell_uploads(draft: Draft, name: str) -> None:
    """Show that copying fails, and tell it once in a row of failures of an attempt."""
    run, last = draft.runs[name], draft.last_attempt(name)
    if last is None or last.upload_failures < TOLD_AFTER:
        draft.show(name, _FAILING, "")
        return
    newest = f"; the newest one there is {last.uploaded}" if last.uploaded else ""
    what = f"{last.upload_error or 'no reason is given'}{newest}"
    draft.show(name, _FAILING, f"{_FAILING}{last.upload_failures} tries in a row; {what}; the training goes on")
    key = f"upload-failed:{name}:{last.number}:{last.uploaded}"
    draft.tell(key, f"run {name}: checkpoints are not copied to {run.spec.checkpoint.object_url}: {what}", run=name)
