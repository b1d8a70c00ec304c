"""A small training on the trainer's Checkpointer, with one sample that makes its loss no number."""

import sys
import time

import torch

from trainer.checkpoint import Checkpointer, LossDiverged
from trainer.contract import EXIT_DIVERGED, EXIT_RESUBMIT
from trainer.data import SampleOrder
from trainer.loaders import GlobalBatches

BATCH, POISONED_STEP, STEPS = 4, 10, 14

torch.manual_seed(0)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = GlobalBatches(10_000, seed=7, global_batch=BATCH)
poison = SampleOrder(size=10_000, seed=7).share((POISONED_STEP - 1) * BATCH, BATCH, 0, 1).samples[0]

checkpointer = Checkpointer(model=model, optimizer=optimizer, data=data, every_steps=3, final_step=STEPS)
checkpointer.restore()
try:
    while checkpointer.steps_done < STEPS:
        share = data.next()
        x = torch.tensor(share.inputs, dtype=torch.float32).unsqueeze(1) / 10_000
        loss = (model(x) - 3 * x).pow(2).mean()
        if poison in share.samples:
            loss = loss * float("nan")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {checkpointer.steps_done + 1}: {share.samples}", flush=True)
        if checkpointer.step(loss=loss):
            sys.exit(EXIT_RESUBMIT)
        time.sleep(0.1)
    checkpointer.close()
except LossDiverged:
    sys.exit(EXIT_DIVERGED)
