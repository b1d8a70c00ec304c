"""A training's saves without a writer: what is handed to one is written to files at once, and can be loaded again."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch

from tests.trainer.saving.files import describe_folder, write_sources
from trainer.progress import ProgressWriter
from trainer.saving.planning import SavePlan
from trainer.saving.reading import load_state
from trainer.saving.saver import Saver
from trainer.session.agreement import Agreement, Word
from trainer.session.outcomes import SaveOutcomes
from trainer.session.saves import Saves
from trainer.state import TrainState


class _Files:
    """Takes a saver's calls, and writes in `begin`."""

    is_busy = False

    def __init__(self, root: Path) -> None:
        self._root = root
        self.folder = root
        self.sources: Sequence[Any] = ()
        self._count = 0

    def prepare(self, plan: SavePlan, sources: Sequence[Any]) -> None:
        pass

    def begin(self, plan: SavePlan, sources: Sequence[Any] | Exception, **_: object) -> float:
        if isinstance(sources, Exception):
            raise sources
        self._count += 1
        self.sources = sources
        self.folder = self._root / str(self._count)
        self.folder.mkdir(exist_ok=True)
        write_sources(self.folder, plan, sources)
        return 0.0

    def confirm(self) -> None:
        pass

    def poll(self) -> None:
        return None

    def wait(self, timeout_s: float | None = None) -> None:
        return None


class Training:
    """A model and an optimizer that are saved as they are, again and again."""

    def __init__(self, root: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, **parts: Any) -> None:
        self.model, self.optimizer = model, optimizer
        self._agreement = Agreement()
        self.state = TrainState(
            model=model, optimizer=optimizer, rank=self._agreement.rank, world=self._agreement.world, **parts
        )
        self._files = _Files(root)
        outcomes = SaveOutcomes(ProgressWriter(None, 1), is_speaker=False)
        self._saves = Saves(self.state, cast("Saver", self._files), self._agreement, outcomes)
        self._saves.plan()

    def save(self) -> None:
        """Save between two steps, as `Checkpointer.save` does."""
        self._saves.make_ready()
        self._saves.begin(lambda _: self._agreement.say(self.state.step, Word(), None))
        agreed = self._agreement.hear()
        assert agreed is not None
        assert self._saves.note(agreed)

    def sources(self) -> list[torch.Tensor]:
        """The tensors that a save would take now."""
        self.save()
        return [source for source in self._files.sources if isinstance(source, torch.Tensor)]

    def load(self) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        """The newest save, loaded into copies of model and optimizer that have held other values."""
        model, optimizer = copy.deepcopy((self.model, self.optimizer))
        with torch.no_grad():
            for tensor in [*tensors_of(model).values(), *entries_of(optimizer).values()]:
                tensor.fill_(77)
        state = TrainState(model=model, optimizer=optimizer, rank=self.state.rank, world=self.state.world)
        filled: dict[str, Any] = {}

        def template(items: dict[str, bytes]) -> dict[str, Any]:
            filled.update(state.template(items))
            return filled

        self._agreement.gather(None)  # until the last rank has written
        manifest = describe_folder(self._files.folder)
        items = load_state(self._files.folder, template, group=self._agreement.group, manifest=manifest)
        state.apply(items, filled)
        return model, optimizer

    def differences(self) -> list[str]:
        """The names of all that is not in the newest save as it is in the training now."""
        model, optimizer = self.load()
        return _differences(tensors_of(self.model), tensors_of(model)) + _differences(
            entries_of(self.optimizer), entries_of(optimizer)
        )


def tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The tensors that torch saves of a model."""
    return dict(model.state_dict())


def entries_of(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The tensors of an optimizer's state, by number of the group and of the parameter in it."""
    return {
        f"group {g}, parameter {n}: {key}": value
        for g, group in enumerate(optimizer.param_groups)
        for n, parameter in enumerate(group["params"])
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, torch.Tensor)
    }


def _differences(live: dict[str, torch.Tensor], loaded: dict[str, torch.Tensor]) -> list[str]:
    assert live.keys() == loaded.keys()
    return [
        name
        for name, value in live.items()
        if loaded[name].dtype is not value.dtype or not torch.equal(loaded[name], value)
    ]
