"""Cells: runs of a tiny configuration on several ranks, over gloo on the CPU, each with a time limit."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import runs
from faults import Fault, fired
from torch.distributed.fsdp import FSDPModule

from . import rank
from .pool import Pool

os.environ["OMP_NUM_THREADS"] = "1"  # for the processes started here

TINY = (
    *runs.STEPS_ONLY,
    "train.grad_clip=null",
    "batch.micro_size=4",
    "optimizer=sgd",
    "optimizer.lr=0.1",
    "schedule=constant",
)
# Lengths from 4 to 16: the number of tokens differs between ranks.
SMALL = ("data.size=96", "data.val_size=37", "data.min_length=4")
GPT = (*runs.MODELS["gpt"], "model.depth=2", "model.dropout=0", *SMALL)
SPREADS = ("ddp", "fsdp", "hsdp")

# Before torch 2.13 FSDP2's half-done backward cannot be reset: there, in the real launcher, all workers restart.
RESETS = hasattr(FSDPModule, "reset_iter_state")
needs_reset = pytest.mark.skipif(not RESETS, reason="FSDP2 recovers in place from torch 2.13 on")


_REFERENCES: dict[tuple[Any, ...], list[rank.Record]] = {}  # see `Cell.reference`


@dataclass
class Cell:
    """The ranks of one test, and the directories of its runs."""

    pool: Pool
    folder: Path
    number: int = 0  # of directories so far

    def directory(self) -> Path:
        """Return a new run directory."""
        self.number += 1
        return self.folder / f"run_{self.number}"

    def run(
        self,
        world: int,
        *overrides: str,
        faults: Sequence[Fault] = (),
        schedule: dict[int, Any] | None = None,
        run_dir: Path | None = None,
        limit: float = 60.0,
        tiny: Sequence[str] = (*TINY, *GPT),
        function: Any = rank.train,
        must_fire: str = "all",
    ) -> list[rank.Record]:
        """Run a configuration. Return what `function` returns on each rank: its record.

        Args:
            world: the number of ranks; 0 is a single process without torch.distributed.
            overrides: of this test.
            faults: errors that strike.
            schedule: `batch.micro_schedule`.
            run_dir: of the run; a new one without it.
            limit: seconds after which the cell has failed.
            tiny: overrides before those of this test.
            function: what a rank does; see `variants`.
            must_fire: whether "all" of the faults must strike, or "any".
        """
        if faults and not RESETS and {"parallel=fsdp", "parallel=hsdp"} & set(overrides):
            pytest.skip(needs_reset.kwargs["reason"])
        settings = runs.configure(run_dir or self.directory(), *tiny, f"parallel.timeout={limit / 3}", *overrides)
        settings = runs.changed(settings, {"batch.micro_schedule": schedule})
        marks = self.folder / f"fired_{self.number}"
        marks.mkdir(exist_ok=True)
        records = self.pool.run(max(1, world), function, settings, faults, str(marks), world == 0, limit=limit)
        missed = [fault for fault in faults if fired(marks, fault) != fault.times]
        if must_fire == "all":
            assert not missed, f"did not fire: {missed}"
        else:
            assert len(missed) < len(faults), f"did not fire: {missed}"
        return records

    def reference(
        self,
        world: int,
        *overrides: str,
        schedule: dict[int, Any] | None = None,
        tiny: Sequence[str] = (*TINY, *GPT),
    ) -> list[rank.Record]:
        """Return the records of an undisturbed run. All tests that ask for the same share it, unchanged."""
        key = (world, overrides, repr(schedule), tuple(tiny))
        if key not in _REFERENCES:
            _REFERENCES[key] = self.run(world, *overrides, schedule=schedule, tiny=tiny)
        return _REFERENCES[key]
