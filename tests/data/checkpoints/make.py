"""Makes the checkpoints of this folder with the frameworks' own code, a few KB each.

    python tests/data/checkpoints/make.py huggingface FOLDER

Some frameworks store where they wrote: take a FOLDER whose name says nothing of the machine.
Each framework in a virtual environment of its own, with torch for CPU; docs/checkpoint-layouts.md has the versions that
the committed ones were made with. Needed only to make them again: the tests read what is committed.
"""

# mypy: disable-error-code="import-not-found, import-untyped, misc, attr-defined, assignment, return-value"
# (none of these frameworks is a dependency of the project)

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def make_dcp(folder: Path) -> None:
    """torch.distributed.checkpoint.save, one process."""
    import torch
    import torch.distributed.checkpoint as dcp

    for step in (2, 4):
        state = {"model": {"w": torch.full((16,), float(step))}, "optimizer": {"m": torch.zeros(16)}, "step": step}
        dcp.save(state, checkpoint_id=folder / f"step-{step}", no_dist=True)


def make_torchtitan(folder: Path) -> None:
    """torchtitan's own CheckpointManager over a small model, and its last save of the weights alone."""
    import torch
    from torch import nn
    from torchtitan.components.checkpointer import CheckpointManager

    _one_process()

    class TrainState:
        step = 0

        def state_dict(self) -> dict[str, Any]:
            return {"step": torch.tensor(self.step)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.step = int(state["step"])

    for name, is_model_only in (("torchtitan", False), ("torchtitan-weights", True)):
        model, train = nn.Linear(4, 4), TrainState()
        optimizer = torch.optim.AdamW(model.parameters())
        config = CheckpointManager.Config(
            enable=True, folder="checkpoint", interval=2, last_save_model_only=is_model_only, async_mode="disabled"
        )
        manager = CheckpointManager(
            config,
            dataloader=None,
            model_parts=[model],
            optimizers=_Stateful(optimizer),
            lr_schedulers=_Stateful(torch.optim.lr_scheduler.ConstantLR(optimizer)),
            states={"train_state": train},
            sd_adapter=None,
            base_folder=str(folder / name),
        )
        for train.step in range(1, 5):
            optimizer.zero_grad()
            model(torch.ones(4)).sum().backward()
            optimizer.step()
            manager.save(train.step, last_step=train.step == 4)
        manager.close()


class _Stateful:
    """Hands a state on to torch.distributed.checkpoint."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def state_dict(self) -> dict[str, Any]:
        return dict(self._inner.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._inner.load_state_dict(state)


def make_megatron(folder: Path) -> None:
    """torch_dist by megatron.core.dist_checkpointing.save; the rest as Megatron-LM's training loop writes it.

    That loop (megatron/training/checkpointing.py, get_checkpoint_name) is not in the package.
    """
    import torch
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing import ShardedTensor

    _one_process()
    torch.cuda.synchronize = lambda *_: None  # its writer wants a GPU, for nothing that is needed here
    torch.cuda.current_device = lambda: "cpu"
    parallel_state.initialize_model_parallel()
    target = folder / "megatron-dist"
    for step in (2, 4):
        place = target / f"iter_{step:07d}"
        place.mkdir(parents=True)
        state = {
            "model": {"w": ShardedTensor.from_rank_offsets("w", torch.full((16,), float(step)), replica_id=0)},
            "iteration": step,
            "args": argparse.Namespace(tensor_model_parallel_size=1, pipeline_model_parallel_size=1),
        }
        dist_checkpointing.save(state, str(place))
        (target / "latest_checkpointed_iteration.txt").write_text(str(step))
    _make_megatron_torch(folder / "megatron")


def _make_megatron_torch(target: Path) -> None:
    import torch

    for step in (2, 4):
        for rank in (0, 1):
            place = target / f"iter_{step:07d}" / f"mp_rank_{rank:02d}"
            place.mkdir(parents=True)
            args = argparse.Namespace(tensor_model_parallel_size=2, pipeline_model_parallel_size=1, lr=0.1)
            state = {"args": args, "checkpoint_version": 3.0, "iteration": step, "model": {"w": torch.ones(4, 4)}}
            torch.save(state, place / "model_optim_rng.pt")
            torch.save([{torch.float32: {"param": torch.zeros(8)}}], place / "distrib_optim.pt")
        (target / "latest_checkpointed_iteration.txt").write_text(str(step))


def make_huggingface(folder: Path) -> None:
    """Trainer of transformers over a model of a few hundred numbers; once more with the weights in several files."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=16, n_positions=8, n_inner=8))
    rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)} for _ in range(8)]
    target = folder / "huggingface"
    arguments = TrainingArguments(
        output_dir=str(target), max_steps=4, save_steps=2, per_device_train_batch_size=1, use_cpu=True, report_to=[]
    )
    Trainer(model=model, args=arguments, train_dataset=rows).train()
    for arguments_file in target.rglob("training_args.bin"):
        arguments_file.unlink()  # names the machine, and nothing resumes from it
    sharded = folder / "huggingface-sharded" / "checkpoint-2"
    shutil.copytree(target / "checkpoint-2", sharded)
    (sharded / "model.safetensors").unlink()
    model.save_pretrained(sharded, max_shard_size="2KB")


def make_lightning(folder: Path) -> None:
    """Trainer of lightning with its checkpoint callback; once more as a distributed checkpoint."""
    import torch
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.demos.boring_classes import BoringModel
    from lightning.pytorch.strategies import ModelParallelStrategy

    def train(target: Path, **extra: Any) -> None:
        saver = ModelCheckpoint(dirpath=target, every_n_train_steps=2, save_top_k=-1, save_last=True)
        trainer = Trainer(
            max_steps=4,
            callbacks=[saver],
            accelerator="cpu",
            devices=1,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            limit_val_batches=0,
            **extra,
        )
        trainer.fit(_Small())

    class _Small(BoringModel):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(32, 2)

        def configure_model(self) -> None:
            return

    train(folder / "lightning")
    strategy = ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=1, process_group_backend="gloo")
    train(folder / "lightning-sharded", strategy=strategy)


def make_deepspeed(folder: Path) -> None:
    """DeepSpeed's engine with sharded optimizer states, two processes (start it with torchrun --nproc-per-node 2)."""
    import deepspeed
    import torch

    deepspeed.init_distributed("gloo")
    for stage in (1, 3):
        model = torch.nn.Linear(8, 8)
        settings = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
        }
        optimizer = torch.optim.AdamW(model.parameters())
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
        for step in range(1, 5):
            engine.backward(engine(torch.ones(1, 8)).sum())
            engine.step()
            if step % 2 == 0:
                engine.save_checkpoint(str(folder / f"deepspeed-zero{stage}"))
        for script in (folder / f"deepspeed-zero{stage}").glob("zero_to_*.py"):
            script.unlink(missing_ok=True)  # a copy of its converters beside every checkpoint


def _one_process() -> None:
    import torch.distributed

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    torch.distributed.init_process_group("gloo")


MAKERS: dict[str, Callable[[Path], None]] = {
    "dcp": lambda folder: make_dcp(folder / "dcp"),
    "torchtitan": make_torchtitan,
    "megatron": make_megatron,
    "huggingface": make_huggingface,
    "lightning": make_lightning,
    "deepspeed": make_deepspeed,
}

if __name__ == "__main__":
    MAKERS[sys.argv[1]](Path(sys.argv[2] if len(sys.argv) > 2 else HERE))
