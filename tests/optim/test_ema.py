import helpers
import pytest
import runs
import torch
from helpers import evaluations, run_cli
from torch import nn

from trainapp.optim.ema import WeightAverage
from trainapp.training import loop

MLP = runs.MODELS["mlp"]


def vector(tensors):
    return torch.cat([t.detach().flatten() for t in tensors])


def test_the_average_by_hand(tmp_path):
    """Once after each applied step, however often it is called: a = 0.9 a + 0.1 w."""
    run = runs.prepare(tmp_path, *MLP, "train.ema=0.9", "batch.micro_size=4")
    expected = runs.weights(run.state.model)
    for _ in range(4):
        loop.train_step(run)
        for _ in range(2):
            run.state.average.catch_up(run.state.progress.step)
        expected = 0.9 * expected + 0.1 * runs.weights(run.state.model)
    run.tracker.close()
    assert runs.relative_error(vector(run.state.average.averages), expected) < 1e-6
    assert runs.relative_error(runs.weights(run.state.model), expected) > 1e-3


def test_evaluation_uses_it_and_training_does_not(tmp_path):
    run = runs.prepare(tmp_path, *MLP, "train.ema=0.5", "train.max_steps=6", "every.eval=6", "optimizer.lr=0.05")
    loop.train(run)
    run.tracker.close()
    model, average = run.state.model, run.state.average
    batch = run.eval_sets[""].dataset.__getitems__(list(range(360)))
    weights = runs.weights(model)

    def loss():
        with torch.no_grad():
            return float(nn.functional.cross_entropy(model.eval()(batch["inputs"]), batch["targets"]))

    of_weights = loss()
    with average.in_place_of_weights():
        of_average = loss()
    assert torch.equal(runs.weights(model), weights)  # restored
    assert helpers.evaluations(tmp_path)[-1]["loss"] == pytest.approx(of_average, rel=1e-6)
    assert abs(of_average - of_weights) > 1e-3


def test_training_is_the_same_with_and_without(tmp_path):
    ends = []
    for number, setting in enumerate(("train.ema=0.9", "train.ema=null")):
        runs.run(tmp_path / str(number), *MLP, setting, "every.eval=2")
        ends.append(runs.saved(tmp_path / str(number), 4))
    assert runs.differences(ends[0]["model"], ends[1]["model"]) == []
    assert ends[0]["average"].keys() == dict(ends[0]["model"]).keys()
    assert ends[1]["average"] == {}


def test_begun_on_resume_it_starts_at_the_weights(tmp_path):
    runs.run_until(tmp_path, 2, *MLP)
    run = runs.prepare(tmp_path, *MLP, "train.ema=0.9")
    run.tracker.close()
    assert torch.equal(vector(run.state.average.averages), runs.weights(run.state.model))
    assert torch.equal(runs.weights(run.state.model), vector(runs.saved(tmp_path, 2)["model"].values()))


@pytest.mark.slow
def test_an_evaluation_of_shards_sees_the_average(tmp_path):
    chosen = ("model=mlp", "data=digits", "train.ema=0.9", "train.max_steps=6", "every.eval=3", "train.device=cpu")
    losses = []
    for strategy in (["parallel=single"], ["parallel=fsdp", "parallel.devices=2"]):
        folder = tmp_path / str(len(strategy))
        done = run_cli(*chosen, *strategy, f"hydra.run.dir={folder}", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        losses.append([line["loss"] for line in evaluations(folder)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)  # of the weights themselves: 17% lower


def test_a_weight_that_is_frozen_later_keeps_its_name():
    """A checkpoint stores each average under the name of its own weight."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    average = WeightAverage(model, 0.9)
    model[0].requires_grad_(False)
    assert average.names == list(dict(model.named_parameters()))
    assert len(average.names) == len(average.averages) == 4


def test_swapping_back_shards_needs_no_memory(monkeypatch):
    """Or a shard would keep its average where memory runs out at the end of an evaluation."""
    model = nn.Linear(3, 2)
    average = WeightAverage(model, 0.5)
    before = vector(model.parameters())
    for weight, of_weight in zip(average.weights, average.averages, strict=True):
        of_weight.add_(1)
        for tensor in (weight, of_weight):  # as shards have
            tensor.device_mesh = None
            tensor._local_tensor = tensor.detach()

    def no_memory(*_, **__):
        raise torch.OutOfMemoryError

    with torch.no_grad(), average.in_place_of_weights():
        assert torch.equal(vector(model.parameters()), before + 1)
        monkeypatch.setattr(torch.Tensor, "clone", no_memory)
        monkeypatch.setattr(torch, "empty", no_memory)
    monkeypatch.undo()
    assert torch.equal(vector(model.parameters()), before)
    assert torch.equal(vector(average.averages), before + 1)
