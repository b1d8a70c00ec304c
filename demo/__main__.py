"""`python -m demo`: the main job, end to end, on a real Slurm: train, lose two nodes and a checkpoint, finish, audit.

Writes .demo/result.json; exit 0 only when everything that it claims was seen.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from demo.audit import Audit, audit
from demo.scene import DemoFailed, Mode, Scene, Training
from slurm.sandbox import SandboxUnavailable
from supervisor.model import Attempt, Checkpoint, CheckpointState, Interruption
from supervisor.store import Store
from trainer.contract import MANIFEST_NAME, Manifest, parse
from trainer.history import read_history

_DIRECTORY = Path(".demo").absolute()


@dataclass(slots=True)
class Story:
    """What was done to the run, and when; printed while it happens."""

    started: float = field(default_factory=time.monotonic)
    injected: dict[str, datetime] = field(default_factory=dict)  # by node
    flipped: Checkpoint | None = None
    rejected: list[Checkpoint] = field(default_factory=list)

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.started:6.1f} s] {text}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m demo", description=__doc__)
    parser.add_argument(
        "--mode",
        choices=("auto", "isolated", "loopback"),
        default="auto",
        help="of the sandbox; auto: what is permitted",
    )
    mode = parser.parse_args(argv).mode
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also when started with it ignored, as in a script
    story = Story()
    try:
        return _show(story, mode)
    except SandboxUnavailable as error:
        print(f"demo: {error}", file=sys.stderr)
    except DemoFailed as error:
        _write_result({"ok": False, "reason": str(error)})
        print(f"demo failed: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print("demo: interrupted; everything was taken down", file=sys.stderr)
        return 130
    return 1


def _show(story: Story, mode: Mode) -> int:
    training = Training()
    with Scene(_DIRECTORY, training, mode=mode, say=story.say) as scene:
        assert scene.sandbox is not None
        story.say(
            f"sandbox: a real Slurm with 4 {scene.sandbox.mode} nodes, up in {scene.cold_start_s:.1f} s"
            + (f" ({scene.sandbox.mode_reason})" if scene.sandbox.mode != "isolated" else "")
        )
        scene.supervisor("submit", str(scene.directory / "gpt.toml"))
        story.say(
            f"submitted: {training.steps} steps of a small GPT on 2 to 3 nodes and a spare, a checkpoint every 4 s"
        )
        cold_start_s = _first_steps(scene, story)
        _lose_a_node(scene, story)
        _lose_a_checkpoint_and_a_node(scene, story)
        _finish(scene, story)
        attempts = scene.attempts()
        with Store.open_readonly(scene.directory / "ledger.db") as store:
            interruptions = store.load_interruptions(scene.name)
            drained = {m.node: m.drain_reason for m in store.load_nodes() if m.is_drained_by_us}
        history = scene.supervisor("history")
        rejected = story.rejected
    story.say("cluster and daemon are down; the same training runs undisturbed beside it")
    undisturbed = _run_undisturbed(training)
    found = _audit(attempts, undisturbed)
    problems = [*found.problems, *_check(training, attempts, interruptions, drained, rejected, story, found)]
    result = _result(found, attempts, interruptions, drained, rejected, story, cold_start_s, problems)
    _write_result(result)
    _tell(result, history, found, problems)
    story.say("ok" if not problems else "NOT ok: " + "; ".join(problems))
    return 0 if not problems else 1


# ---------------------------------------------------------------- scenes


def _first_steps(scene: Scene, story: Story) -> float:
    submitted = scene.wait_for("attempt 1", lambda: next(iter(scene.attempts()), None), 30)
    first = scene.wait_for("the first step", lambda: scene.stepping(1), 90)
    assert first.stepped_at is not None
    cold_start_s = (first.stepped_at - submitted.planned_at).total_seconds()
    story.say(
        f"attempt 1 trains on {', '.join(first.nodes)} as job {first.job_id}; first step after {cold_start_s:.1f} s"
    )
    return cold_start_s


def _lose_a_node(scene: Scene, story: Story) -> None:
    kept = scene.wait_for(
        "two verified checkpoints", lambda: scene.verified() if len(scene.verified()) >= 2 else None, 90
    )
    attempt = scene.attempts()[-1]
    story.say(f"verified checkpoints: steps {', '.join(str(c.step) for c in kept)}")
    victim = attempt.nodes[1]  # not the batch host: the second cut takes that
    _cut(scene, story, victim)
    _await_next_start(scene, story, attempt)


def _await_next_start(scene: Scene, story: Story, attempt: Attempt) -> None:
    """Follow a recovery inside the job: what the launcher found, and the first new step."""
    found = scene.wait_for("the notice", lambda: next(iter(scene.interruptions()), None), 60)
    story.say(f"the launcher stopped the training: {found.cause}")
    again = scene.wait_for(
        "its first new step", lambda: next((i for i in scene.interruptions() if i.resumed_at), None), 90
    )
    now = scene.attempts()[-1]
    where = "in the same job" if now.number == attempt.number else f"as attempt {now.number}"
    story.say(
        f"it trains again {where}, from step {again.resume_step}: "
        f"{(again.resumed_at - story.injected[again.node or '']).total_seconds():.1f} s after the cut"
        if again.resumed_at and again.node in story.injected
        else f"it trains again {where}, from step {again.resume_step}"
    )


def _lose_a_checkpoint_and_a_node(scene: Scene, story: Story) -> None:
    attempt = scene.attempts()[-1]
    seen = {c.key for c in scene.verified()}

    def newer() -> list[Checkpoint]:
        return [c for c in scene.verified(attempt.number) if c.key not in seen]

    newest = scene.wait_for("two newer verified checkpoints", lambda: newer()[-1] if len(newer()) >= 2 else None, 90)
    path = flip_one_byte(Path(newest.path))
    story.flipped = newest
    story.say(f"one byte of step {newest.step} flipped on disk, in {path.name}")
    _cut(scene, story, attempt.nodes[0])
    story.say("  (it was the batch host: its launcher is gone with it, so the service submits another job)")
    _await_next(scene, story, attempt)


def _cut(scene: Scene, story: Story, node: str) -> None:
    assert scene.sandbox is not None
    story.injected[node] = datetime.now(UTC)
    scene.sandbox.power_cut(node)
    story.say(f"power of {node} cut")


def _await_next(scene: Scene, story: Story, before: Attempt) -> None:
    """Follow one recovery: notice, end, next attempt, first new step."""
    over = scene.wait_for(
        "the notice", lambda: next((a for a in scene.attempts() if a.number == before.number and a.is_over), None), 60
    )
    story.say(f"attempt {before.number} is over: {over.end_detail}")
    after = scene.wait_for(
        "the next attempt", lambda: next((a for a in scene.attempts() if a.number == before.number + 1), None), 60
    )
    # Looked at now: a refused checkpoint is removed once newer ones are verified.
    story.rejected = [c for c in scene.checkpoints() if c.state is CheckpointState.CORRUPT]
    for checkpoint in story.rejected:
        story.say(f"refused: step {checkpoint.step} of attempt {checkpoint.attempt}: {checkpoint.detail}")
    story.say(f"attempt {after.number}: {after.nodes_wanted} nodes, from step {after.resume_step}")
    stepping = scene.wait_for("its first new step", lambda: scene.stepping(after.number), 90)
    story.say(f"attempt {after.number} trains on {', '.join(stepping.nodes)} as job {stepping.job_id}")


def _finish(scene: Scene, story: Story) -> None:
    def finished() -> bool:
        run = scene.run()
        return run is not None and run.state == "finished"

    scene.wait_for("the end of the training", finished, 180)
    story.say("the training has finished")


def flip_one_byte(checkpoint: Path) -> Path:
    """Change one bit in the middle of the largest shard; its size and time stamps stay as they are."""
    manifest = parse(Manifest, (checkpoint / MANIFEST_NAME).read_bytes())
    largest = max(manifest.files, key=lambda f: f.size_bytes)
    path = checkpoint / largest.path
    before = path.stat()
    with path.open("r+b") as stream:
        stream.seek(largest.size_bytes // 2)
        byte = stream.read(1)
        stream.seek(largest.size_bytes // 2)
        stream.write(bytes([byte[0] ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    return path


# ---------------------------------------------------------------- the undisturbed run, the audit


def _run_undisturbed(training: Training) -> Path:
    """The same seed and steps on three ranks, nobody disturbing; returns its run directory."""
    run_dir = _DIRECTORY / "undisturbed"
    shutil.rmtree(run_dir, ignore_errors=True)
    run_dir.mkdir(parents=True)
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"]
    with (_DIRECTORY / "undisturbed.log").open("wb") as log:
        ended = subprocess.run(
            [*argv, *training.command, "--run-dir", str(run_dir)],
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            timeout=180,
            check=False,
        )
    if ended.returncode != 0:
        raise DemoFailed(f"the undisturbed run ended with {ended.returncode}: see {_DIRECTORY}/undisturbed.log")
    return run_dir


def _audit(attempts: tuple[Attempt, ...], undisturbed: Path) -> Audit:
    survived = read_history(_DIRECTORY / "runs" / "gpt", attempts[-1].number)
    same_size = []
    for attempt in attempts:  # up to the first change of node count: later steps inherit another order of sums
        if attempt.nodes_wanted != 3:
            break
        same_size.append(attempt.number)
    return audit(survived, read_history(undisturbed, 1), frozenset(same_size))


def _check(
    training: Training,
    attempts: tuple[Attempt, ...],
    interruptions: tuple[Interruption, ...],
    drained: dict[str, str],
    rejected: list[Checkpoint],
    story: Story,
    found: Audit,
) -> list[str]:
    flipped = story.flipped
    resumed = [(a.nodes_wanted, a.resume_step) for a in attempts]
    rows = (
        (found.final_step == training.steps, f"the last step is {found.final_step}, not {training.steps}"),
        ([n for n, _ in resumed] == [3, 2], f"node counts were {[n for n, _ in resumed]}, not 3, 2"),
        (set(drained) == set(story.injected), f"drained: {sorted(drained)}, cut: {sorted(story.injected)}"),
        (
            flipped is not None and [(c.step, c.attempt) for c in rejected] == [(flipped.step, flipped.attempt)],
            f"refused checkpoints: {[(c.step, c.attempt) for c in rejected]}",
        ),
        (
            flipped is not None and 0 < resumed[-1][1] < flipped.step,
            f"the last attempt resumed from step {resumed[-1][1]}, not from before the flipped one",
        ),
        (
            [i.node for i in interruptions] == list(story.injected) and all(i.resumed_at for i in interruptions),
            "the ledger does not hold both interruptions, resumed",
        ),
        (
            [i.attempt for i in interruptions] == [1, 1],
            f"the interruptions are of attempts {[i.attempt for i in interruptions]}: the first was not survived",
        ),
    )
    return [text for is_so, text in rows if not is_so]


def _result(
    found: Audit,
    attempts: tuple[Attempt, ...],
    interruptions: tuple[Interruption, ...],
    drained: dict[str, str],
    rejected: list[Checkpoint],
    story: Story,
    cold_start_s: float,
    problems: list[str],
) -> dict[str, Any]:
    return {
        "ok": not problems,
        "reason": "; ".join(problems),
        "final_step": found.final_step,
        "attempts": [
            {
                "attempt": a.number,
                "job_id": a.job_id,
                "nodes": list(a.nodes),
                "resume_step": a.resume_step,
                "end": a.end,
            }
            for a in attempts
        ],
        "interruptions": [_interruption(i, story.injected.get(i.node or "")) for i in interruptions],
        "drained": [{"node": node, "reason": reason} for node, reason in drained.items()],
        "rejected_checkpoints": [{"step": c.step, "attempt": c.attempt, "reason": c.detail} for c in rejected],
        "loss_max_rel_diff": found.max_rel_diff,
        "samples_repeated": found.samples_repeated,
        "samples_skipped": found.samples_skipped,
        "cold_start_s": round(cold_start_s, 2),
        "audit": asdict(found),
    }


def _interruption(record: Interruption, injected_at: datetime | None) -> dict[str, Any]:
    """`recovery_s`: from the cut to the first new step."""
    begin = injected_at or record.detected_at
    return {
        "kind": record.kind,
        "cause": record.cause,
        "node": record.node,
        "injected_at": injected_at.isoformat() if injected_at else None,
        "detected_at": record.detected_at.isoformat(),
        "resumed_at": record.resumed_at.isoformat() if record.resumed_at else None,
        "recovery_s": round((record.resumed_at - begin).total_seconds(), 2) if record.resumed_at else None,
        "lost_steps": record.lost_steps,
    }


def _write_result(result: dict[str, Any]) -> None:
    _DIRECTORY.mkdir(parents=True, exist_ok=True)
    (_DIRECTORY / "result.json").write_text(json.dumps(result, indent=2) + "\n")


def _tell(result: dict[str, Any], history: str, found: Audit, problems: list[str]) -> None:
    print("\nTimeline")
    for attempt in result["attempts"]:
        nodes = ",".join(attempt["nodes"])
        print(f"  attempt {attempt['attempt']}  {nodes:<10} from step {attempt['resume_step']:>4}  {attempt['end']}")
    for item in result["interruptions"]:
        print(
            f"  {item['node']}: new step {item['recovery_s']:.1f} s after the cut, "
            f"{item['lost_steps']} steps done again"
        )
    print("\nFailure history (supervisor history; RECOVERY counts from the notice, not from the cut)")
    print(history.rstrip())
    print("\nAudit against the undisturbed run")
    print(
        f"  final step {found.final_step}; samples repeated {found.samples_repeated}, skipped {found.samples_skipped}"
    )
    print(
        f"  largest relative difference of the loss: {found.max_rel_diff_same_size:.1e} on three nodes, "
        f"{found.max_rel_diff:.1e} over all steps\n"
    )
    if problems:
        print("Not as it must be: " + "; ".join(problems))


if __name__ == "__main__":
    sys.exit(main())
