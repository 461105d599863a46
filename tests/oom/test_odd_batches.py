"""Batches that are not cut by rows: a run that ran out of memory is the one with its sizes from the start."""

import json
from pathlib import Path

import odd_batches
import pytest
import torch
from runs import differences

from .conftest import tiny
from .inject import Injector, Recorded

pytestmark = pytest.mark.usefixtures("without_pictures")

OVERRIDES = (
    *odd_batches.OVERRIDES,
    "train.max_steps=4",
    "every.eval=4",
    "batch.eval_micro_size=12",
)


QUICK = ("packed", "table", "strings", "nested")
SOME = [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.slow) for kind in odd_batches.KINDS]


def trained(run_dir: Path, kind: str, injector: Injector | None, schedule: dict | None = None, eval_size: int = 12):
    """The run and its evaluation."""
    changes = {"data.kind": kind, "batch.eval_micro_size": eval_size}
    recorded = Recorded(tiny(run_dir, *OVERRIDES, schedule=schedule, changes=changes), injector)
    (line,) = (run_dir / "evaluations.jsonl").read_text().splitlines()
    return recorded, json.loads(line)


@pytest.mark.parametrize("kind", SOME)
def test_memory_runs_out_in_training(tmp_path, kind):
    injector = Injector("backward", 2, 3)
    recorded, evaluation = trained(tmp_path / "a", kind, injector)
    assert [(f.old_size, f.new_size) for f in recorded.failures] == [(8, 4)]
    again, same_evaluation = trained(tmp_path / "b", kind, None, recorded.run.sizes.micro_schedule())
    assert list(recorded.run.sizes.micro_schedule().items())[:2] == [(1, 8), (2, 4)]
    ends = [run.state() | {"fetched": run.samples()} for run in (recorded, again)]  # however they were cut
    assert differences(*ends) == []
    assert evaluation == same_evaluation


@pytest.mark.parametrize("kind", SOME)
def test_memory_runs_out_in_evaluation(tmp_path, kind):
    injector = Injector("evaluate", 4, 40)
    recorded, evaluation = trained(tmp_path, kind, injector)
    assert injector.fired == 1
    assert [(f.phase, f.old_size, f.new_size) for f in recorded.failures] == [("evaluate", 12, 6)]
    # Each sample counts once.
    data, model = odd_batches.Texts("val", kind="list of tensors"), recorded.run.state.model.eval()
    with torch.no_grad(), recorded.run.state.average.in_place_of_weights():
        _, count, metrics = odd_batches.task(model, data.__getitems__(range(len(data))))
    assert evaluation["accuracy"] == pytest.approx(float(metrics["accuracy"]) / count, abs=1e-9)
