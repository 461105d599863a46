"""Saves the state of a run into checkpoints, synchronously or in the background, and restores it from one."""

import contextlib
import functools
import logging
import pickle
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from trainapp.checkpoint import shards, state_dicts
from trainapp.checkpoint.directory import CheckpointDirectory, describe
from trainapp.checkpoint.sample_rows import SampleRows
from trainapp.checkpoint.state_dicts import ModelState
from trainapp.checkpoint.train_state import TrainState, changed_sizes
from trainapp.errors import UserError
from trainapp.files import VALUES, fsync
from trainapp.models import adapters
from trainapp.parallel.ranks import Ranks, SingleRank
from trainapp.state.stateful import Stateful
from trainapp.units import listed

log = logging.getLogger(__name__)


class PendingCheckpoint(NamedTuple):
    """A checkpoint that is written in the background."""

    step: int
    files: Future[dict[str, Any]]  # the description of this rank's files, once they are written
    config: dict[str, Any]
    is_best: bool


class Checkpointer:
    """Saves one run's state into its checkpoint directory.

    Args:
        state: the run's state.
        directory: None writes nothing, as `checkpointing.save=false` asks.
        ranks: all ranks of the run.
        asynchronous: `save` copies the state to host memory and a thread writes it while training continues, one
            checkpoint at a time. A checkpoint gets its name in `finish`, which every `save` begins with.
    """

    def __init__(self, state: TrainState, directory: CheckpointDirectory | None, ranks: Ranks, asynchronous: bool):
        self.state = state
        self.directory = directory
        self.ranks = ranks
        self.asynchronous = asynchronous
        self.saved_at = 0  # the step of the last save or resume
        self.clock = time.monotonic()  # when the last save began, or this process; for `every.save` in minutes
        self.is_due = False  # by any rank's clock, as agreed in the last step
        self.committed_at: int | None = None  # the step of the last complete checkpoint
        self.has_saved = False  # in this process
        self._not_saved: list[str] = []  # names of what checkpoints do not hold, once some are known
        # Starts no thread before it is needed. torch's writer asks for CUDA's stream, and a thread begins on GPU 0,
        # where every rank would open a context.
        self._background = ThreadPoolExecutor(1, "checkpoint", initializer=_use_device, initargs=(state.device,))
        self.pending: PendingCheckpoint | None = None

    def save(self, step: int, config: dict[str, Any], sizes: dict[str, Any], is_best: bool) -> None:
        """Save the state at `step`. Collective. Raises TrainingStopped when a disk refuses the write.

        Args:
            step: the step.
            config: goes into the manifest.
            sizes: plain values that `restore` returns.
            is_best: whether it is the best checkpoint so far.
        """
        self.saved_at = step
        self.clock = time.monotonic()
        self.is_due = False
        if self.directory is None:
            return
        self.finish()
        self.has_saved = True

        rows_by_rank = self.state.sample_rows.join(self.ranks)
        values = self.state.values(self.ranks) | {"sizes": sizes}
        if rows_by_rank:
            values["rows_by_rank"] = rows_by_rank
        tensors = self.state.tensors(values)
        self._note_what_is_not_saved()
        if self._not_saved:
            values["not_saved"] = self._not_saved

        # Write them: now, or from copies while training continues.
        folder = self.directory.begin(step)
        if self.asynchronous:
            copies = shards.copy_to_host(tensors, folder)
            files = self._background.submit(self._write, copies, values, folder)
            self.pending = PendingCheckpoint(step, files, config, is_best)
        else:  # in this thread: CUDA's current device is set per thread
            write = functools.partial(self._write, tensors, values, folder)
            self.directory.commit(step, write, config, is_best)
            self.committed_at = step

    @property
    def busy(self) -> bool:
        """Whether this rank is still writing in the background. A step asks only while a checkpoint is `pending`."""
        return self.pending is not None and not self.pending.files.done()

    def finish(self) -> None:
        """Wait for the checkpoint in the background, if any, and commit it. Collective. Raises the errors of `save`."""
        pending = self.pending
        if pending is None or self.directory is None:
            return
        self.pending = None  # also after an error: it is not committed twice
        self.directory.commit(pending.step, pending.files.result, pending.config, pending.is_best)
        self.committed_at = pending.step

    def newest_name(self) -> str | None:
        """Return the newest checkpoint's path, not verified, or None."""
        if self.directory is None:
            return None
        return self.directory.newest_name()

    def _note_what_is_not_saved(self) -> None:
        """Note what a run changes outside of state dicts, and warn once: a resume starts from its initial values."""
        if self._not_saved:
            return
        self._not_saved = self.state.not_saved()
        if self._not_saved:
            log.warning(
                "a checkpoint does not hold what training changes in %s: a resumed run starts from the initial values. "
                "Make it a buffer, registered in __init__, or return it from get_extra_state (a task that is no "
                "module: state_dict; an optimizer: in `state` or `param_groups`). Do nothing if every forward computes "
                "it anew, or the first one builds it the same in each process (docs/reliability.md)",
                listed(self._not_saved, most=4),
            )

    def _write(self, tensors: dict[str, Any], values: dict[str, Any], folder: Path) -> dict[str, Any]:
        """Write this rank's files and describe them: its shards, and on rank 0 the files common to all ranks."""
        shards.write(tensors, folder, self.ranks.saving_group)
        paths = list(folder.glob(f"__{self.ranks.rank}_*"))
        if self.ranks.is_rank_zero:
            torch.save(values, folder / VALUES)
            paths.append(folder / shards.METADATA)
            paths.append(folder / VALUES)

        # They must be on the disk before the checkpoint gets its name.
        for path in paths:
            fsync(path)
        fsync(folder)
        return describe(sorted(paths))


def restore(state: TrainState, path: Path, ranks: Ranks) -> dict[str, Any]:
    """Fill `state` from the checkpoint at `path`, written by any number of ranks. Return its plain values. Collective.

    A weight average that was not saved is reset to the weights. Raises UserError if the checkpoint does not fit the
    model or the optimizer, or holds anything but tensors and plain values.
    """
    values = load_values(path)
    sizes = shards.sizes(path)

    # Tensors are read in place, into memory that fits them.
    with misfits_named(path):
        state.follow(values, sizes)
        tensors = state.tensors(values, sizes)
    shards.read(tensors, path, ranks.saving_group, hint=changed_sizes(state.filled, values))
    if not tensors.get("average"):
        state.average.start_at_weights()

    # Then everything else.
    with misfits_named(path):
        state.load_values(values)
    state.sample_rows.load(values.get("rows_by_rank", ()), ranks)
    state.load_stateful(values["stateful"], ranks)
    _warn_of_what_is_missing(values)
    return values


def _warn_of_what_is_missing(values: Mapping[str, Any]) -> None:
    """Warn of what training had changed and the checkpoint does not hold."""
    if values.get("not_saved"):
        log.warning(
            "the checkpoint does not hold %s, which training had changed: it has its initial value here, so that "
            "results that depend on it differ from those in training, unless it is a fixed network that the first "
            "forward loads anew",
            listed(values["not_saved"], most=4),
        )


def restore_model(model: nn.Module, path: Path, filled: Mapping[str, Any]) -> dict[str, Any]:
    """Fill a newly built model, whole in this process, from the checkpoint at `path`: parameters by their average if
    the run kept one. Return the checkpoint's plain values. Raises UserError as `restore`.

    Args:
        model: the model.
        path: the checkpoint.
        filled: the model's sizes that the data determine, for that error.
    """
    values = load_values(path)
    sizes = shards.sizes(path)
    _fill_model(model, path, values, filled)
    SampleRows(model).load(values.get("rows_by_rank", ()), SingleRank())

    _warn_of_what_is_missing(values)

    # The average in place of its parameters, if there is one.
    averaged = {}
    for name, parameter in model.named_parameters():
        if f"average.{name}" in sizes:
            averaged[name] = parameter.detach()
    if averaged:
        shards.read({"average": averaged}, path, None)

    # The states of other owners: those of rank 0.
    state_dicts.load_stateful(Stateful(model=model), values["stateful"][0])
    return values


def _fill_model(model: nn.Module, path: Path, values: Mapping[str, Any], filled: Mapping[str, Any]) -> None:
    """Fill a model, whole in this process, as it was trained. Arguments: see `restore_model`; values: the checkpoint's
    plain ones.
    """
    model_state = ModelState(model)
    model_values = values["model_values"]
    with misfits_named(path):
        adapters.require_same_base(model, values["base"])
        tensors = {"model": model_state.tensors(model_values), "buffers": model_state.buffers(shards.sizes(path))}
    shards.read(tensors, path, None, hint=changed_sizes(filled, dict(values)))
    with misfits_named(path):
        model_state.load_values(model_values)


@contextlib.contextmanager
def filled_for_trials(
    model: nn.Module, tasks: Mapping[str, Any], path: Path, filled: Mapping[str, Any]
) -> Iterator[None]:
    """Give a newly built model, whole in this process, and its tasks the state of the checkpoint at `path` inside the
    block: for trial calls before `restore`, which fills the model's tensors again. The states of other owners are put
    back, since `restore` may leave some as they were built. Raises UserError as `restore`.

    Args:
        model: neither compiled nor sharded yet.
        tasks: by their names in checkpoints.
        path: the checkpoint.
        filled: the model's sizes that the data determine, for that error.
    """
    values = load_values(path)
    _fill_model(model, path, values, filled)
    stateful = Stateful(model=model, **tasks)
    states_before = {name: owner.copy() for name, owner in stateful.owners.items()}
    state_dicts.load_stateful(stateful, values["stateful"][0])
    try:
        yield
    finally:
        for name, state in states_before.items():
            stateful.owners[name].restore(state)


def weights_in(path: Path, model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the weights in the checkpoint at `path`, whole, in host memory: parameters (their average if the run kept
    one) and buffers. With adapters: the adapters, and what forwards have written in their base.

    Raises UserError unless the checkpoint has adapters for the base of `model`, or neither has any.
    """
    with misfits_named(path):
        adapters.require_same_base(model, load_values(path)["base"])

    # Choose what to read for each name of the model's state dict.
    sizes = shards.sizes(path)
    saved_names = {}
    for saved_name in sizes:
        part, _, name = saved_name.partition(".")
        if part == "model":
            average = f"average.{name}"
            saved_names[name] = average if average in sizes else saved_name

    tensors = {}
    for saved_name in saved_names.values():
        shape, dtype = sizes[saved_name]
        tensors[saved_name] = torch.empty(shape, dtype=dtype)
    shards.fill(tensors, path, no_dist=True)
    return {name: tensors[saved_name] for name, saved_name in saved_names.items()}


@contextlib.contextmanager
def misfits_named(path: Path) -> Iterator[None]:
    """Convert errors inside the block into a UserError that names the checkpoint."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (UserError, RuntimeError, ValueError, KeyError, TypeError) as error:
        file_name = "" if isinstance(error, UserError) else f"{VALUES}: "
        raise UserError(f"checkpoint {path} does not fit this configuration: {file_name}{error}") from error


def load_values(path: Path) -> dict[str, Any]:
    """Load the values onto the CPU. Executes nothing from the file."""
    try:
        return torch.load(path / VALUES, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"checkpoint {path} holds more than tensors and plain values; not loaded: {reason}") from None
    except (OSError, RuntimeError, ValueError, KeyError, EOFError) as error:
        raise UserError(f"checkpoint {path}: {VALUES} cannot be read: {error}") from error


def _use_device(device: torch.device) -> None:
    """Make it this thread's current one."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
