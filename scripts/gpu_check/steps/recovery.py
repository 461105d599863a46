"""Real out-of-memory errors in forward, backward and recomputation, 20 each: recovered from, and memory given back.

On the CPU 4 each, to see that the step works.
"""

from pathlib import Path
from typing import Any

import runs
import torch
from gpu import on_gpu

from trainapp.memory.device import DeviceMemory
from trainapp.models.inspect import blocks_of
from trainapp.run import runner
from trainapp.sizes.micro_batches import MicroBatchSizes
from trainapp.training.phase import Phase
from trainapp.training.session import Session

from .. import jobs
from ..table import Table

TIMES = {"cuda": 20, "cpu": 4}
PLACES = {"forward": Phase.FORWARD, "backward": Phase.BACKWARD, "recomputation": Phase.BACKWARD}


def check(table: Table, device: str, folder: Path) -> None:
    """Two rows per place."""
    free = jobs.unlimited(folder / "free", *jobs.overrides(device, "gpt", "train.max_steps=3"))
    for place in PLACES:
        with table.attempt(f"{TIMES[device]} errors in {place}", "recovered from"):
            at_place(table, device, folder / place, place, 4 * free.peak_memory_bytes)


def at_place(table: Table, device: str, folder: Path, place: str, limit: int) -> None:
    """A run in whose every step memory runs out once."""
    times = TIMES[device]
    checkpointing = "full" if place == "recomputation" else "none"
    session = runs.prepare(
        folder,
        *jobs.overrides(device, "gpt", "train.max_steps=1", "checkpointing=off", f"memory.limit={limit}"),
        f"activation_checkpointing={checkpointing}",
        "every.log=null",
    )
    session.tracker.picture = lambda *_: None  # drawing 20 figures would take longer than all else
    size = session.state.global_size
    over_allocation = OverAllocation(session, place)
    phases, used = [], []
    try:
        for number in range(1, times + 1):
            session.config.train.max_steps = number
            session.sizes.train = MicroBatchSizes(
                size, grow=False
            )  # as in a new run: each error halves the whole batch
            over_allocation.is_due = True
            failure = runner.attempt(session)
            if failure is None:
                break
            phases.append(failure.phase)
            runner.recover(session, failure)
            del failure
            used.append(jobs.live_bytes(device))
            if runner.attempt(session) is not None:
                break
        steps, samples = session.state.progress.step, session.state.progress.samples
    finally:
        session.close()
    table.expect(
        f"{times} errors in {place}",
        f"all of them there, {times} steps of {size} samples",
        f"{phases.count(PLACES[place])} there, {len(phases)} in all, {steps} steps, {samples} samples",
        phases == [PLACES[place]] * times and (steps, samples) == (times, times * size),
    )
    growth = used[-1] - used[0] if used else 0
    table.expect(
        f"memory after the last of {times} errors in {place}, less that after the first",
        "at most 1 MiB",
        f"{jobs.text(growth)}; {jobs.text(used[0] if used else 0)} after the first",
        len(used) == times and growth <= on_gpu.MIB,
    )


class OverAllocation:
    """Asks for more than the limit at one place of the last block, once whenever `is_due` is set."""

    def __init__(self, session: Session, place: str):
        self.is_due = False
        self._run, self._place = session, place
        self._memory: DeviceMemory = session.memory
        block = blocks_of(session.state.model, "")[-1]
        block.register_forward_hook(self._after_forward)
        # A hook of the block is outside of what is recomputed; this one of its first submodule is inside.
        next(block.children()).register_forward_pre_hook(self._within_forward)

    def _within_forward(self, *_: Any) -> None:
        recomputing = self._run.attempt.phase is Phase.BACKWARD
        if self._place == ("recomputation" if recomputing else "forward"):
            self._ask()

    def _after_forward(self, module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
        if self._place == "backward" and output.requires_grad:
            output.register_hook(lambda gradient: self._ask())

    def _ask(self) -> None:
        if self.is_due:
            self.is_due = False
            torch.empty(self._memory.budget + 1, dtype=torch.uint8, device=self._run.state.device)
