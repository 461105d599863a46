"""For every kind of batch container the run is the same when memory runs out in training and in evaluation."""

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from batch_kinds import KINDS
from runs import differences

from trainapp.data.sets.digits import Digits

from .conftest import tiny
from .inject import Injector, Recorded

pytestmark = pytest.mark.usefixtures("without_pictures")

OVERRIDES = (
    "model=mlp",
    "model.width=16",
    "model.dropout=0.1",
    "data=digits",
    "~data.augment",
    "data._target_=batch_kinds.DigitsInKind",
    "user_packages=[batch_kinds]",
    "train.max_steps=3",
    "every.eval=3",
    "batch.eval_micro_size=90",
)


def trained(run_dir: Path, kind: str, phase: str, step: int) -> tuple[Recorded, dict[str, float]]:
    """Three steps in micro-batches of 8, and an evaluation; memory runs out once, in `phase` of `step`."""
    injector = Injector(phase, step, 5)
    recorded = Recorded(tiny(run_dir, *OVERRIDES, changes={"data.kind": kind}), injector)
    assert injector.fired == len(recorded.failures) == 1
    (line,) = (run_dir / "evaluations.jsonl").read_text().splitlines()
    return recorded, json.loads(line)


@functools.cache
def trained_on_dicts(phase: str, step: int) -> tuple[dict[str, Any], dict[str, float]]:
    with tempfile.TemporaryDirectory() as folder:
        recorded, evaluation = trained(Path(folder), "dict", phase, step)
        return recorded.state(), evaluation


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "dict"])
@pytest.mark.parametrize(("phase", "step", "sizes"), [("backward", 2, (8, 4)), ("evaluate", 3, (90, 45))])
def test_a_run_is_the_same_for_every_kind(tmp_path, kind, phase, step, sizes):
    recorded, evaluation = trained(tmp_path, kind, phase, step)
    assert [(f.phase, f.step, f.old_size, f.new_size) for f in recorded.failures] == [(phase, step, *sizes)]
    state, by_dicts = trained_on_dicts(phase, step)
    assert differences(recorded.state(), state) == []
    assert evaluation == by_dicts
    # Each sample counts once: the mean equals that over the whole evaluation set in one batch.
    model, digits = recorded.run.state.model.eval(), Digits("val")
    batch = digits.__getitems__(range(len(digits)))
    with torch.no_grad(), recorded.run.state.average.in_place_of_weights():
        right = (model(batch["inputs"]).argmax(-1) == batch["targets"]).sum().item()
    assert evaluation["accuracy"] == pytest.approx(right / len(digits), abs=1e-9)
    # A batch whose contents are opaque would be neither measured nor cut.
    assert set(recorded.run.sizes.train.searches) == {128}


@pytest.mark.parametrize("kind", KINDS)
def test_a_limit_counts_and_cuts_every_kind(tmp_path, kind):
    """Under a real limit the first fetch does not fit, whether it is a dict or another container."""
    changes = {"data.kind": kind, "batch.micro_size": "auto", "batch.global_size": 64, "every.eval": None}
    peaks = []
    for limit in (None, 60_000):
        recorded = Recorded(tiny(tmp_path / str(limit), *OVERRIDES, changes={**changes, "memory.limit": limit}))
        peaks.append(recorded.run.memory.peak)
    assert peaks[1] <= 60_000 < peaks[0]
    assert recorded.failures
    assert recorded.run.sizes.train.size < 64
