"""Stands for a training: steps, checkpoints and faults by plan, on the contract alone, without torch.

The plan says what goes wrong in which attempt after how many steps: `plan=1:stall@3,2:exit75@4,*:raise@5`.
Rank 0 trains; the others end as it ends.
"""

import os
import signal
import sys
import time
from pathlib import Path

import xxhash

from trainer import contract
from trainer.contract import Manifest, ManifestFile, Progress, RunPaths, UploadReport

given = dict(word.split("=", 1) for word in sys.argv[1:])
final_step = int(given.get("steps", "100000"))
step_s = float(given.get("step_s", "0.1"))
save_every = int(given.get("save_every", "5"))
plan = given.get("plan", "")
saves = given.get("saves", "")  # attempts that save and exit with 75 when they are asked to; the others ignore it
save_s = float(given["save_s"]) if "save_s" in given else None  # how long a save is said to block
save_error = given.get("save_error", "").replace("_", " ")  # with it every save fails, and the training goes on
upload_error = given.get("upload_error", "").replace("_", " ")  # with it no checkpoint gets to object storage

attempt = int(os.environ[contract.ENV_ATTEMPT])
paths = RunPaths(Path(os.environ[contract.ENV_RUN_DIR]))
launch = int(os.environ.get(contract.ENV_LAUNCH, "0"))
ended = paths.attempt_dir(attempt) / f"rank0.ended.{launch}"
seq = 0
failures = 0
requests = 0


def find_fault() -> tuple[str, int]:
    for row in plan.split(",") if plan else []:
        which, _, what = row.partition(":")
        if which in ("*", str(attempt)):
            kind, _, after = what.partition("@")
            return kind, int(after)
    return "", 0


def report(step: int, phase: str) -> None:
    global seq  # noqa: PLW0603
    seq += 1
    record = Progress(
        attempt=attempt,
        step=step,
        final_step=final_step,
        phase=phase,
        time=time.time(),
        seq=seq,
        samples=step,
        save_blocking_s=save_s if save_s is None else save_s + seq * 1e-6,  # every save is measured anew
        save_failures=failures,
        save_error=save_error if failures else "",
        launch=launch,
    )
    contract.write_json(paths.progress(attempt), record)


def diverge(step: int) -> None:
    """As a training does that finds its loss wrong: at this step, in the batch of one sample."""
    record = contract.Divergence(
        attempt=attempt,
        kind="nan",
        onset_step=step,
        step=step,
        first_sample=step - 1,
        end_sample=step,
        time=time.time(),
    )
    contract.write_json(paths.divergence(attempt), record)
    end(contract.EXIT_DIVERGED)


def is_asked_to_save() -> bool:
    """Whether the service has asked for more saves than were made."""
    global requests
    try:
        advice = contract.parse(contract.Advice, paths.advice(attempt).read_bytes())
    except FileNotFoundError:
        return False
    is_new, requests = advice.save_requests > requests, advice.save_requests
    return is_new


def save(step: int) -> None:
    global failures  # noqa: PLW0603
    if save_error:
        failures += 1
        return
    data = f"{step}\n".encode()
    folder = paths.checkpoint(step, attempt)
    contract.write_bytes(folder / "state", data)
    file = ManifestFile(path="state", size_bytes=len(data), xxh3_128=xxhash.xxh3_128_hexdigest(data))
    manifest = Manifest(
        run=os.environ[contract.ENV_RUN],
        attempt=attempt,
        step=step,
        samples=step,
        world_size=int(os.environ["WORLD_SIZE"]),
        time=time.time(),
        format="plain",
        files=(file,),
    )
    contract.write_json(folder / contract.MANIFEST_NAME, manifest)
    if upload_error:
        told = UploadReport(attempt=attempt, node=0, failures=step, error=upload_error, time=time.time())
        contract.write_json(paths.upload_report(attempt, 0), told)


def end(code: int) -> None:
    contract.write_bytes(ended, str(code).encode())
    sys.exit(code)


def train() -> None:
    kind, after = find_fault()
    asked: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, _frame: asked.append(number))
    resume_from = os.environ[contract.ENV_RESUME_FROM]
    first = step = int(Path(resume_from, "state").read_text()) if resume_from else 0
    report(step or -1, "start")
    while step < final_step:
        time.sleep(step_s)
        step += 1
        report(step, "step")
        if step % save_every == 0 or is_asked_to_save():
            save(step)
        if asked and saves in ("*", str(attempt)):
            save(step)
            end(75)
        if kind and step - first >= after:
            if kind == "stall":
                time.sleep(600)
            if kind == "diverge":
                diverge(step)
            if kind == "raise":
                raise RuntimeError(f"the loss is not a number at step {step}")
            end(int(kind.removeprefix("exit")))
    report(step, "end")
    end(0)


if int(os.environ["RANK"]) == 0:
    meeting = f"{os.environ['MASTER_ADDR']} {os.environ.get('TORCHELASTIC_RUN_ID', '')}"
    contract.write_bytes(paths.attempt_dir(attempt) / "meeting", meeting.encode())
    contract.write_bytes(paths.attempt_dir(attempt) / "skips", os.environ[contract.ENV_SKIP_SAMPLES].encode())
    train()
while not ended.exists():
    time.sleep(0.1)
sys.exit(int(ended.read_text()))
