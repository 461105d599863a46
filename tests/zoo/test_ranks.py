"""The zoo on two ranks with DDP: one of them runs out of memory, and each ends as in the replay of the schedule."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from faults import Fault, fired
from parallel.pool import Pool
from runs import differences

from trainapp.config.schema import Batch

from . import ranks
from .catalogue import ALL, STATEFUL
from .harness import configure

pytestmark = pytest.mark.slow
# Those with state, and every second of the others.
NAMES = [name for number, (name, cell) in enumerate(ALL.items()) if cell.ranks and (name in STATEFUL or number % 2)]
CELLS = [
    pytest.param(name, marks=() if name == "running scale" or number % 10 == 0 else pytest.mark.nightly)
    for number, name in enumerate(NAMES)
]
SETTINGS = {  # 8, 4, then 2 samples: steps of 32, 32, 16 and 32 on two ranks
    "batch.global_size": 32,
    "data.size": 80,
    "every.eval": 2,
    "checkpointing.save": False,
}


def trained(pool: Pool, name: str, folder: Path, settings: dict[str, Any], faults: Sequence[Fault] = ()) -> list[Any]:
    """What each of two ranks ends with. All faults must fire."""
    folder.mkdir()
    config = configure(ALL[name], folder, settings)
    parallel = dataclasses.replace(config.parallel, strategy="ddp", devices=2, timeout=20.0)
    config = dataclasses.replace(config, parallel=parallel)
    records = pool.run(2, ranks.train, config, name, faults, str(folder), limit=60.0)
    assert [fault for fault in faults if fired(folder, fault) != 1] == []
    return records


def differs_from_its_replay(pool: Pool, name: str, folder: Path, *faults: Fault) -> list[str]:
    """Where a rank differs from itself in the replay of the schedule."""
    run = trained(pool, name, folder / "run", SETTINGS, faults)
    assert run[0].schedule == run[1].schedule
    updates = len(ALL[name].updates) or 1
    changes = [step for own in Batch(micro_schedule=run[0].schedule).schedules.values() for step in own]
    assert len(changes) == updates + len({fault.step for fault in faults} - {1})
    sizes = {"batch.micro_size": "auto", "batch.micro_schedule": run[0].schedule}
    replay = trained(pool, name, folder / "replay", {**SETTINGS, **sizes})
    assert not any(record.failures for record in replay)
    return [
        f"rank {rank}: {difference}"
        for rank in (0, 1)
        for difference in differences(run[rank].state, replay[rank].state)
    ]


@pytest.mark.parametrize("name", CELLS)
def test_one_rank_out_of_memory(pool, tmp_path, name):
    faults = (Fault("forward", 3, 1, rank=1), Fault("backward", 4, 8))
    assert differs_from_its_replay(pool, name, tmp_path, *faults) == []


@pytest.mark.parametrize(
    "name", ["moco", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("running scale", "replay"))]
)
def test_both_ranks_out_of_memory_in_the_first_step(pool, tmp_path, name):
    faults = (Fault("backward", 1, 6), Fault("backward", 1, 6, rank=1))
    assert differs_from_its_replay(pool, name, tmp_path, *faults) == []
