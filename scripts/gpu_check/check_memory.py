"""Real out-of-memory errors in forward, backward and recomputation, 20 each, and 40 evaluations: memory is given back.

On the CPU fewer, to see that the checks work.
"""

from typing import Any

import pytest
import runs
import torch
from gpu import on_gpu

from gpu_check import jobs
from trainapp.models.inspect import blocks_of
from trainapp.run import runner
from trainapp.run.recover import recover
from trainapp.sizes.micro_batches import MicroBatchSizes
from trainapp.training import loop
from trainapp.training.evaluation.evaluate import evaluate
from trainapp.training.phase import Phase
from trainapp.training.session import Session

ERRORS, EVALUATIONS = {"cuda": 20, "cpu": 4}, {"cuda": 40, "cpu": 10}
PLACES = {"forward": Phase.FORWARD, "backward": Phase.BACKWARD, "recomputation": Phase.BACKWARD}


@pytest.mark.parametrize("place", PLACES)
def test_errors(tmp_path, device, got, place):
    """one error in every step, each sample once; after the last at most 1 MiB more memory than after the first"""
    free = jobs.unlimited(tmp_path / "free", *jobs.overrides(device, "gpt", "train.max_steps=3"))
    session = runs.prepare(
        tmp_path / "run",
        *jobs.overrides(device, "gpt", "train.max_steps=1", "checkpointing=off", "every.log=null"),
        f"memory.limit={4 * free.peak_memory_bytes}",
        f"activation_checkpointing={'full' if place == 'recomputation' else 'none'}",
    )
    session.tracker.queue_picture = lambda *_: None  # drawing 20 figures would take longer than all else
    size, times, phases, used = session.config.batch.global_size, ERRORS[device], [], []
    over_allocation = OverAllocation(session, place)
    for number in range(1, times + 1):
        session.config.train.max_steps = number
        # As in a new run: an error halves the whole batch.
        session.sizes.train = session.sizes.by_update[""] = MicroBatchSizes(size, grow=False)
        over_allocation.is_due = True
        failure = runner.run_until_oom(session)
        assert failure is not None
        phases.append(failure.phase)
        recover(session, failure)
        del failure
        used.append(jobs.live_bytes(device))
        assert runner.run_until_oom(session) is None
    progress = session.state.progress
    session.close()
    got(f"{jobs.text(used[0])} after the first, {jobs.text(used[-1])} after the last")
    assert phases == [PLACES[place]] * times
    assert (progress.step, progress.samples) == (times, times * size)
    assert used[-1] - used[0] <= on_gpu.MIB


class OverAllocation:
    """Asks for more than the limit at one place of the last block, once whenever `is_due` is set."""

    def __init__(self, session: Session, place: str):
        self.is_due = False
        self._session, self._place = session, place
        block = blocks_of(session.state.model, "")[-1]
        block.register_forward_hook(self._after_forward)
        # A hook of the block is outside of what is recomputed; this one of its first submodule is inside.
        next(block.children()).register_forward_pre_hook(self._within_forward)

    def _within_forward(self, *_: Any) -> None:
        recomputing = self._session.engine.phase is Phase.BACKWARD
        if self._place == ("recomputation" if recomputing else "forward"):
            self._ask()

    def _after_forward(self, module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
        if self._place == "backward" and output.requires_grad:
            output.register_hook(lambda gradient: self._ask())

    def _ask(self) -> None:
        if self.is_due:
            self.is_due = False
            torch.empty(self._session.memory.budget + 1, dtype=torch.uint8, device=self._session.state.device)


def test_evaluations(tmp_path, device, got):
    """from the 5th on allocated bytes grow by 1 MiB at most, reserved ones by 20"""
    settings = jobs.overrides(device, "mlp", "train.max_steps=1000", "checkpointing=off", "every.eval=1")
    session = runs.prepare(tmp_path, *settings, "batch.eval_micro_size=32")
    allocated, reserved = [], []
    for _ in range(EVALUATIONS[device]):
        loop.train_step(session)
        evaluate(session)
        allocated.append(jobs.live_bytes(device))
        reserved.append(torch.cuda.memory_reserved() if device == "cuda" else 0)
    session.close()
    growth = [sizes[-1] - sizes[4] for sizes in (allocated, reserved)]  # the first ones still fill the cache
    got(f"{jobs.text(growth[0])} and {jobs.text(growth[1])}")
    assert growth[0] <= on_gpu.MIB
    assert growth[1] <= 20 * on_gpu.MIB
