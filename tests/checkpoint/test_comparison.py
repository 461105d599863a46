"""Comparing the checkpoints of two runs: by bits, and by distances that do not depend on how they are read."""

import math
import shutil

import pytest
import runs
import torch

from trainapp.checkpoint import comparison
from trainapp.checkpoint.comparison import choose, compare
from trainapp.errors import UserError

pytestmark = pytest.mark.usefixtures("one_thread")
MLP = (*runs.MODELS["mlp"], "checkpointing.keep_last=9", "every.save=2", "every.eval=4")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Two runs that differ in the rate alone, with checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("pair")
    runs.run(folder / "a", *MLP)
    runs.run(folder / "b", *MLP, "optimizer.lr=0.002")
    return folder / "a", folder / "b"


def test_distances_are_those_of_the_saved_tensors(pair):
    difference = compare(*choose(*pair, None))
    a, b = (runs.saved(run, 4)["model"] for run in pair)
    names = {f"model.{name}" for name in a}
    assert difference.steps == (4, 4)
    assert {tensor.name for tensor in difference.weights} == names
    for tensor in difference.weights:
        of_a, of_b = (side[tensor.name.removeprefix("model.")].double() for side in (a, b))
        assert tensor.largest == float((of_a - of_b).abs().max())
        larger = max(of_a.norm(), of_b.norm())
        assert tensor.relative == pytest.approx(float((of_a - of_b).norm() / larger), rel=1e-12)
    relatives = [tensor.relative for tensor in difference.weights]
    assert relatives == sorted(relatives, reverse=True)
    vectors = [torch.cat([side[name].double().flatten() for name in sorted(a)]) for side in (a, b)]
    distance = float((vectors[0] - vectors[1]).norm() / max(vector.norm() for vector in vectors))
    assert difference.relative == pytest.approx(distance, rel=1e-12)
    assert not difference.has_equal_optimizer
    assert not difference.is_equal
    assert "sampler" not in difference.others  # both have drawn the same samples


def test_small_parts_give_the_same(pair, monkeypatch):
    whole = compare(*choose(*pair, None))
    monkeypatch.setattr(comparison, "_AT_ONCE", 100)
    monkeypatch.setattr(comparison, "_WIDE_AT_ONCE", 7)
    parts = compare(*choose(*pair, None))
    assert [tensor.name for tensor in parts.weights] == [tensor.name for tensor in whole.weights]
    for one, other in zip(parts.weights, whole.weights, strict=True):
        assert (one.largest, one.relative) == (other.largest, pytest.approx(other.relative, rel=1e-12))
    assert parts.relative == pytest.approx(whole.relative, rel=1e-12)


def test_a_checkpoint_equals_itself(pair):
    difference = compare(*choose(pair[0], pair[0], 2))
    assert difference.steps == (2, 2)
    assert (difference.equal, difference.relative, difference.others) == (6, 0.0, [])
    assert difference.is_equal


def test_tensors_are_compared_by_bits():
    nan = torch.tensor([math.nan, math.inf])
    assert comparison._has_equal_bits(nan, nan.clone())
    assert not comparison._has_equal_bits(torch.tensor(0.0), torch.tensor(-0.0))
    assert not comparison._has_equal_bits(torch.tensor(0.0), torch.tensor(0))
    distance = comparison._Distance()
    distance.measure(nan, torch.zeros(2))
    assert (distance.largest, distance.relative) == (math.inf, math.inf)


def test_which_checkpoints_are_compared(pair, tmp_path):
    run_a, run_b = pair
    shorter = tmp_path / "shorter"
    shutil.copytree(run_b, shorter)
    shutil.rmtree(shorter / "checkpoints/step_00000004")
    assert [path.name for path in choose(run_a, shorter, None)] == ["step_00000002", "step_00000002"]
    other = tmp_path / "other"
    shutil.copytree(run_a, other)
    shutil.rmtree(other / "checkpoints/step_00000002")
    assert [path.name for path in choose(shorter, other, None)] == ["step_00000002", "step_00000004"]  # none in both
    assert [path.name for path in choose(run_a, run_b, "best")] == ["step_00000004", "step_00000004"]
    with pytest.raises(UserError, match=r"--step 4: .*shorter has no checkpoint of this step; it has: 2"):
        choose(run_a, shorter, 4)
    with pytest.raises(UserError, match=r"--step best: RUN=.*/best: the checkpoint that it names no longer exists"):
        choose(run_a, shorter, "best")
