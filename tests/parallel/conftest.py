"""Cells of several ranks: gloo and CPU processes, tiny models, a time limit on each."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import runs
from faults import Fault, fired
from torch.distributed.fsdp import FSDPModule

from . import cells
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


REFERENCES: dict[tuple[Any, ...], list[cells.Record]] = {}  # see `Cell.reference`


@dataclass
class Cell:
    """Runs tiny configurations on ranks dedicated to this test, in separate directories."""

    pool: Pool
    folder: Path
    number: int = 0

    def directory(self) -> Path:
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
        function: Any = cells.train,
        must_fire: str = "all",
    ) -> list[cells.Record]:
        """One record per rank; world 0 is a single process without torch.distributed. All faults must fire."""
        if faults and not RESETS and {"parallel=fsdp", "parallel=hsdp"} & set(overrides):
            pytest.skip(needs_reset.kwargs["reason"])
        settings = runs.configure(run_dir or self.directory(), *tiny, f"parallel.timeout={limit / 3}", *overrides)
        settings = runs.changed(settings, {"batch.micro_schedule": schedule})
        marks = self.folder / f"fired_{self.number}"
        marks.mkdir(exist_ok=True)
        records = self.pool.run(max(1, world), function, settings, faults, str(marks), world == 0, limit=limit)
        missed = [fault for fault in faults if fired(marks, fault) != fault.times]
        assert not missed if must_fire == "all" else len(missed) < len(faults), f"did not fire: {missed}"
        return records

    def reference(
        self,
        world: int,
        *overrides: str,
        schedule: dict[int, Any] | None = None,
        tiny: Sequence[str] = (*TINY, *GPT),
    ) -> list[cells.Record]:
        """The records of an undisturbed run. All tests that ask for the same share it, unchanged."""
        key = (world, overrides, repr(schedule), tuple(tiny))
        if key not in REFERENCES:
            REFERENCES[key] = self.run(world, *overrides, schedule=schedule, tiny=tiny)
        return REFERENCES[key]


@pytest.fixture
def cell(pool: Pool, tmp_path: Path) -> Cell:
    return Cell(pool, tmp_path)
