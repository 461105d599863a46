"""Puts the state of a run into a checkpoint and takes it out again: one file, or shards of many ranks."""

import logging
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainapp.checkpoint import STATE, Checkpoints, load, read_manifest
from trainapp.errors import UserError
from trainapp.optim.optimizers import step_without_effect
from trainapp.parallel.placement import whole
from trainapp.parallel.ranks import Alone
from trainapp.state import TrainState, rng_state

log = logging.getLogger(__name__)


@dataclass
class Pending:
    """A checkpoint that is being written in the background."""

    future: Future
    folder: Path
    step: int
    config: dict[str, Any]
    is_best: bool


class Saver:
    """Saves one run's state. With `asynchronous`, shards are written while training goes on, one at a time."""

    def __init__(self, state: TrainState, checkpoints: Checkpoints, ranks: Alone, asynchronous: bool):
        self.state, self.checkpoints, self.ranks = state, checkpoints, ranks
        self.asynchronous = asynchronous and ranks.world > 1
        self.pending: Pending | None = None

    def save(self, step: int, config: dict[str, Any], is_best: bool) -> None:
        """For all ranks. Raises TrainingStopped when a disk refuses."""
        self.finish()
        if self.ranks.world == 1:
            self.checkpoints.save(self._write_whole, step, config, is_best)
        elif self.asynchronous:
            self._begin(step, config, is_best)
        else:
            self.checkpoints.save(self._write_shards, step, config, is_best)

    @property
    def busy(self) -> bool:
        """Whether this rank still writes."""
        return self.pending is not None and not self.pending.future.done()

    def finish(self) -> None:
        """Wait for what is being written, and commit it. For all ranks."""
        pending, self.pending = self.pending, None
        if pending is None:
            return
        self.checkpoints.together(pending.step, pending.folder, pending.future.result)
        self.checkpoints.commit(pending.folder, pending.step, pending.config, pending.is_best)

    def _write_whole(self, folder: Path) -> None:
        torch.save({**_whole(self.state.tensors()), **self._values()}, folder / STATE)

    def _write_shards(self, folder: Path) -> None:
        from trainapp.parallel import shards  # late: a single process never needs it

        shards.write(shards.tensors_of(self.state.tensors()), folder, self.ranks.saving_group)
        self._write_extra(folder)

    def _begin(self, step: int, config: dict[str, Any], is_best: bool) -> None:
        from trainapp.parallel import shards

        folder = self.checkpoints.begin(step)
        self._write_extra(folder)
        future = shards.write_later(shards.tensors_of(self.state.tensors()), folder, self.ranks.saving_group)
        self.pending = Pending(future, folder, step, config, is_best)

    def _write_extra(self, folder: Path) -> None:
        from trainapp.parallel.shards import EXTRA

        values = self._values()
        if self.ranks.leads:
            torch.save(values, folder / EXTRA)

    def _values(self) -> dict[str, Any]:
        return self.state.values(self.ranks.gather(rng_state(self.state.device)))


def _whole(values: dict[str, Any]) -> dict[str, Any]:
    """One rank's shards are all of the tensor; a file of plain tensors opens anywhere."""
    return {
        name: _whole(value) if isinstance(value, dict) else whole(value) if torch.is_tensor(value) else value
        for name, value in values.items()
    }


def restore(state: TrainState, path: Path, ranks: Alone) -> dict[str, Any]:
    """Fill `state` from the checkpoint at `path`, written by any number of ranks. Returns the sizes that it had.

    Raises UserError when it does not fit the model or the optimizer.
    """
    if len(state.optimizer.state) < len(state.optimizer_parameters()):
        step_without_effect(state.optimizer)  # an optimizer that makes its state late: something to load into
    try:
        if (path / STATE).is_file():
            saved = load(path)
            state.load_whole(saved)
        else:
            from trainapp.parallel import shards

            own = state.tensors()
            averaged = read_manifest(path)["config"]["train"].get("ema")
            if not averaged:
                own["average"] = {}
            shards.read(shards.tensors_of(own), path, ranks.saving_group)
            if not averaged:
                with torch.no_grad():  # it begins here
                    for average, weight in zip(state.average.averages, state.average.weights, strict=True):
                        average.copy_(weight)
            saved = load(path, shards.EXTRA)
        state.load_values(saved, ranks.rank, ranks.world)
    except (RuntimeError, ValueError, KeyError) as error:
        raise UserError(f"checkpoint {path} does not fit this configuration's model or optimizer: {error}") from None
    return saved["sizes"]
