"""Puts the state of a run into a checkpoint and takes it out again: one file, or shards of many ranks."""

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainapp.checkpoint.checkpoints import STATE, Checkpoints, load, read_manifest
from trainapp.checkpoint.train_state import TrainState
from trainapp.errors import UserError
from trainapp.optim.optimizers import step_without_effect
from trainapp.parallel.dtensor import whole
from trainapp.parallel.ranks import Ranks
from trainapp.rng import rng_state

log = logging.getLogger(__name__)


@dataclass
class Pending:
    """A checkpoint that is being written in the background. The future's result are its files' digests."""

    future: Future
    folder: Path
    step: int
    config: dict[str, Any]
    is_best: bool


class Saver:
    """Saves one run's state. With `asynchronous`, a copy of it is written while training goes on, one at a time."""

    def __init__(self, state: TrainState, checkpoints: Checkpoints, ranks: Ranks, asynchronous: bool):
        self.state, self.checkpoints, self.ranks = state, checkpoints, ranks
        self.asynchronous = asynchronous
        self.pending: Pending | None = None
        self._background = ThreadPoolExecutor(1, "checkpoint")  # starts no thread before it is needed

    def save(self, step: int, config: dict[str, Any], is_best: bool) -> None:
        """For all ranks. Raises TrainingStopped when a disk refuses."""
        self.finish()
        if self.asynchronous:
            self._begin(step, config, is_best)
        else:
            write = self._write_whole if self.ranks.world == 1 else self._write_shards
            self.checkpoints.save(write, step, config, is_best)

    @property
    def busy(self) -> bool:
        """Whether this rank still writes."""
        return self.pending is not None and not self.pending.future.done()

    def finish(self) -> None:
        """Wait for what is being written, and commit it. For all ranks."""
        pending, self.pending = self.pending, None
        if pending is None:
            return
        digests: dict[str, Any] = {}
        self.checkpoints.together(pending.step, pending.folder, lambda: digests.update(pending.future.result()))
        self.checkpoints.commit(pending.folder, digests, pending.step, pending.config, pending.is_best)

    def _write_whole(self, folder: Path) -> None:
        torch.save({**_whole(self.state.tensors()), **self._values()}, folder / STATE)

    def _write_shards(self, folder: Path) -> None:
        from trainapp.checkpoint import shards  # late: a single process never needs it

        values = self._values()
        shards.write(shards.tensors_of(self.state.tensors()), folder, self.ranks.saving_group)
        if self.ranks.is_rank_zero:
            torch.save(values, folder / shards.EXTRA)

    def _begin(self, step: int, config: dict[str, Any], is_best: bool) -> None:
        folder = self.checkpoints.begin(step)
        write = self._write_copy(folder) if self.ranks.world == 1 else self._write_shards_later(folder)

        def work() -> dict[str, Any]:
            write()
            return self.checkpoints.digests(folder)

        self.pending = Pending(self._background.submit(work), folder, step, config, is_best)

    def _write_copy(self, folder: Path) -> Callable[[], None]:
        """What writes the state of this moment: it is copied to host memory now."""
        tensors, values = _whole(self.state.tensors(), copied=True), self._values()
        return lambda: torch.save({**tensors, **values}, folder / STATE)

    def _write_shards_later(self, folder: Path) -> Callable[[], None]:
        from trainapp.checkpoint import shards

        values = self._values()
        copied = shards.write_later(shards.tensors_of(self.state.tensors()), folder, self.ranks.saving_group)

        def write() -> None:
            copied.result()
            if self.ranks.is_rank_zero:
                torch.save(values, folder / shards.EXTRA)

        return write

    def _values(self) -> dict[str, Any]:
        return self.state.values(self.ranks.all_gather_object(rng_state(self.state.device)))


def _whole(values: dict[str, Any], copied: bool = False) -> dict[str, Any]:
    """One rank's shards are all of the tensor; a file of plain tensors opens anywhere. `copied` to host memory."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            found[name] = _whole(value, copied)
        elif torch.is_tensor(value):
            found[name] = whole(value).detach().to("cpu", copy=True) if copied else whole(value)
        else:
            found[name] = value
    return found


def restore(state: TrainState, path: Path, ranks: Ranks) -> dict[str, Any]:
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
            from trainapp.checkpoint import shards

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
