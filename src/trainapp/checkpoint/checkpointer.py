"""Saves the state of a run into checkpoints, synchronously or in the background, and restores it from one."""

import contextlib
import logging
import pickle
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainapp.checkpoint import shards, state_dicts
from trainapp.checkpoint.directory import CheckpointDirectory, describe
from trainapp.checkpoint.state_dicts import ModelState
from trainapp.checkpoint.train_state import TrainState, changed_sizes
from trainapp.errors import UserError
from trainapp.files import fsync
from trainapp.models import adapters
from trainapp.parallel.ranks import Ranks
from trainapp.state.stateful import Stateful
from trainapp.units import listed

VALUES = "values.pt"  # everything except the tensors of model, optimizer and average
log = logging.getLogger(__name__)


class Checkpointer:
    """Saves one run's state into its checkpoint directory.

    directory: None writes nothing, as `checkpointing.save=false` asks. asynchronous: `save` copies the state to host
    memory and a thread writes it while training continues, one checkpoint at a time. A checkpoint gets its name in
    `finish`, which every `save` begins with.
    """

    def __init__(self, state: TrainState, directory: CheckpointDirectory | None, ranks: Ranks, asynchronous: bool):
        self.state, self.directory, self.ranks = state, directory, ranks
        self.asynchronous = asynchronous
        self.saved_at = 0  # the step of the last save or resume
        self.clock = time.monotonic()  # when the last save began, or this process; for `every.save` in minutes
        self.is_due = False  # by any rank's clock, as agreed in the last step
        self.committed_at: int | None = None  # the step of the last complete checkpoint
        self.has_saved = False  # in this process
        self._not_saved: list[str] = []  # what the log has named
        self._background = ThreadPoolExecutor(1, "checkpoint")  # starts no thread before it is needed
        self.pending: tuple[Future[dict[str, Any]], Callable[..., None]] | None = None  # being written; its commit

    def save(self, step: int, config: dict[str, Any], sizes: dict[str, Any], is_best: bool) -> None:
        """Save the state at `step`. Collective. Raises TrainingStopped when a disk refuses the write.

        config: goes into the manifest. sizes: plain values that `restore` returns.
        """
        self.saved_at, self.clock, self.is_due = step, time.monotonic(), False
        if (directory := self.directory) is None:
            return
        self.finish()
        self.has_saved = True
        values = self.state.values(self.ranks) | {"sizes": sizes}
        tensors = self.state.tensors(values)
        self._say_what_is_not_saved()
        folder = directory.begin(step)

        def commit(write: Callable[[], dict[str, Any]]) -> None:
            directory.commit(step, write, config, is_best)
            self.committed_at = step

        if self.asynchronous:
            copies = shards.copy_to_host(tensors, folder)
            self.pending = self._background.submit(self._write, copies, values, folder), commit
        else:  # in this thread: CUDA's current device is set per thread
            commit(lambda: self._write(tensors, values, folder))

    @property
    def busy(self) -> bool:
        """Whether this rank is still writing in the background. A step asks only while a checkpoint is `pending`."""
        return self.pending is not None and not self.pending[0].done()

    def finish(self) -> None:
        """Wait for the checkpoint in the background, if any, and commit it. Collective. Raises the errors of `save`."""
        if self.pending is not None:
            (written, commit), self.pending = self.pending, None
            commit(written.result)

    def newest_name(self) -> str | None:
        """See `CheckpointDirectory.newest_name`."""
        return None if self.directory is None else self.directory.newest_name()

    def _say_what_is_not_saved(self) -> None:
        """Warn once: a resume starts from the initial values of what a run changes outside of state dicts."""
        names = self.state.model_state.not_saved()
        if names and not self._not_saved:
            log.warning(
                "a checkpoint does not hold what training changes in %s: plain attributes, and buffers that a "
                "forward registers or reshapes; a resumed run starts from their initial values. Register them as "
                "buffers in __init__, or return them from get_extra_state",
                listed(names, most=4),
            )
        self._not_saved = self._not_saved or names

    def _write(self, tensors: dict[str, Any], values: dict[str, Any], folder: Path) -> dict[str, Any]:
        """Write this rank's files and describe them: its shards, and on rank 0 the files common to all ranks."""
        shards.write(tensors, folder, self.ranks.saving_group)
        own = list(folder.glob(f"__{self.ranks.rank}_*"))
        if self.ranks.is_rank_zero:
            torch.save(values, folder / VALUES)
            own += [folder / shards.METADATA, folder / VALUES]
        for path in (*own, folder):
            fsync(path)
        return describe(sorted(own))


def restore(state: TrainState, path: Path, ranks: Ranks) -> dict[str, Any]:
    """Fill `state` from the checkpoint at `path`, written by any number of ranks. Returns its plain values. Collective.

    A weight average that was not saved is reset to the weights. Raises UserError if the checkpoint does not fit the
    model or the optimizer, or holds anything but tensors and plain values.
    """
    values, sizes = load_values(path), shards.sizes(path)
    with misfits_named(path):
        state.follow(values, sizes)
        tensors = state.tensors(values, sizes)
    shards.read(tensors, path, ranks.saving_group, hint=changed_sizes(state.filled, values))
    if not tensors.get("average"):
        state.average.start_at_weights()
    with misfits_named(path):
        state.load_values(values)
    state.load_stateful(values["stateful"], ranks)
    return values


def restore_model(model: nn.Module, path: Path, filled: Mapping[str, Any]) -> dict[str, Any]:
    """Fill a newly built model, whole in this process, from the checkpoint at `path`: parameters by their average if
    the run kept one. Returns the checkpoint's plain values. Raises UserError as `restore`.

    filled: the model's sizes that the data determine, for that error.
    """
    values, sizes = load_values(path), shards.sizes(path)
    own, saved = ModelState(model), values["model_values"]
    with misfits_named(path):
        adapters.require_same_base(model, values["base"])
        tensors = {"model": own.tensors(saved), "buffers": own.buffers(sizes)}
    shards.read(tensors, path, None, hint=changed_sizes(filled, values))
    with misfits_named(path):
        own.load_values(saved)
    averaged = {name: p.detach() for name, p in model.named_parameters() if f"average.{name}" in sizes}
    shards.read({"average": averaged} if averaged else {}, path, None)
    state_dicts.load_stateful(Stateful(model=model), values["stateful"][0])
    return values


def weights_in(path: Path, model: nn.Module) -> dict[str, torch.Tensor]:
    """The weights in the checkpoint at `path`, whole, in host memory: parameters (their average if the run kept one)
    and buffers. With adapters: the adapters, and what forwards have written in their base.

    Raises UserError unless the checkpoint has adapters for the base of `model`, or neither has any.
    """
    with misfits_named(path):
        adapters.require_same_base(model, load_values(path)["base"])
    saved = shards.sizes(path)
    names = [name.removeprefix("model.") for name in saved if name.startswith("model.")]
    sources = {name: f"average.{name}" if f"average.{name}" in saved else f"model.{name}" for name in names}
    read = {source: torch.empty(saved[source][0], dtype=saved[source][1]) for source in sources.values()}
    shards.fill(read, path, no_dist=True)
    return {name: read[source] for name, source in sources.items()}


@contextlib.contextmanager
def misfits_named(path: Path) -> Iterator[None]:
    """Convert errors inside the block into a UserError that names the checkpoint."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (UserError, RuntimeError, ValueError, KeyError, TypeError) as error:
        place = "" if isinstance(error, UserError) else f"{VALUES}: "
        raise UserError(f"checkpoint {path} does not fit this configuration: {place}{error}") from error


def load_values(path: Path) -> dict[str, Any]:
    """Load the values onto the CPU. Executes nothing from the file."""
    try:
        return torch.load(path / VALUES, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"checkpoint {path} holds more than tensors and plain values; not loaded: {reason}") from None
    except (OSError, RuntimeError, ValueError, KeyError, EOFError) as error:
        raise UserError(f"checkpoint {path}: {VALUES} cannot be read: {error}") from error
