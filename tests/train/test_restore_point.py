"""The state that a step can restore: generators and buffers."""

import random
from collections.abc import Callable

import numpy as np
import pytest
import runs
import torch
from torch import nn

from trainapp.rng import rng_state
from trainapp.train import loop
from trainapp.train.restore_point import RestorePoint

CPU = torch.device("cpu")


def test_an_aborted_step_leaves_no_trace(tmp_path):
    """Buffers and generators are as before the step, and repeating the step gives the same result as doing it once."""
    overrides = (*runs.MODELS["resnet"], "batch.micro_size=4", "train.max_steps=3")
    ends = []
    for aborts in (False, True):
        run = runs.prepare(tmp_path / str(aborts), *overrides)
        loop.train_step(run)
        if aborts:
            before, state = {k: v.clone() for k, v in run.state.model.state_dict().items()}, rng_state(CPU)
            run.restore_point.take()
            runs.accumulate(run)
            torch.rand(5), np.random.rand(5), random.random()
            assert runs.differences(run.state.model.state_dict(), before) != []
            run.restore_point.restore()
            run.state.optimizer.zero_grad()
            assert runs.differences(run.state.model.state_dict(), before) == []
            assert runs.differences(rng_state(CPU), state) == []
        loop.train(run)
        run.tracker.close()
        ends.append(run.state.model.state_dict())
    assert runs.differences(*ends) == []


def test_constant_buffers_are_copied_once():
    """A causal mask or rotary table costs nothing per step."""
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
    model[1].register_buffer("table", torch.ones(1000), persistent=False)
    point = RestorePoint(model, CPU)
    point.take()
    before = {name: (copy, copy._version) for name, copy in point.tensors._copies.items()}
    model(torch.randn(4, 2))
    point.take()
    moved = {name for name, copy in point.tensors._copies.items() if copy._version > before[name][1]}
    assert moved == {"model.0.running_mean", "model.0.running_var", "model.0.num_batches_tracked"}
    assert all(point.tensors._copies[name] is copy for name, (copy, _) in before.items())
    assert before.keys() - moved == {"model.1.table"}


def step(point: RestorePoint, write: Callable[[], None]) -> None:
    """A step whose forward does `write`, and whose optimizer writes the bias."""
    point.take()
    write()
    point.tensors.note_step()
    with torch.no_grad():
        point._model.bias += 1


def test_parameters_are_copied_only_once_a_forward_has_written_them():
    model = nn.Linear(2, 2)
    point = RestorePoint(model, CPU)
    for number in range(6):
        step(point, lambda: None)
        assert not point.tensors.written
        assert not point.tensors._copies, number
    step(point, lambda: model.weight.detach().mul_(2))
    step(point, lambda: None)
    assert list(point.tensors._copies) == ["model.weight"]
    before = model.weight.detach().clone()
    point.take()
    model.weight.detach().mul_(2)
    point.restore()
    assert not point.lost
    assert torch.equal(model.weight, before)


def test_what_only_the_first_step_writes_is_not_copied_for_ever():
    model = nn.Linear(2, 2)
    point = RestorePoint(model, CPU)
    step(point, lambda: model.weight.detach().mul_(2))
    assert point.tensors.written == {"model.weight": True}
    step(point, lambda: None)
    step(point, lambda: None)
    assert not point.tensors.written
    assert not point.tensors._copies


def test_a_write_without_a_copy_is_lost_and_named():
    model = nn.Linear(2, 2)
    point = RestorePoint(model, CPU)
    point.take()
    model.weight.detach().mul_(2)
    point.restore()
    assert point.lost == ["model.weight"]
    assert point.tensors.written == {"model.weight": True}
    point.take()
    model.weight.detach().mul_(2)
    point.restore()
    assert not point.lost


WRITES = {
    "in place": lambda weight: weight.detach().mul_(-1),
    "through data": lambda weight: weight.data.mul_(-1),
    "through NumPy": lambda weight: np.negative(weight.detach().numpy(), out=weight.detach().numpy()),
    "one bit": lambda weight: weight.data.view(torch.int32)[0, 0].add_(1),
    "rows exchanged": lambda weight: weight.data.copy_(weight.data.flip(0)),
}


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "sliced"])
@pytest.mark.parametrize(
    ("write", "dtype"),
    [
        *((write, torch.float32) for write in WRITES),
        *((write, torch.bfloat16) for write in ("in place", "through data", "rows exchanged")),
    ],
)
def test_every_write_is_noticed_while_a_size_is_unproven(write, dtype, layout):
    whole = torch.randn(70, 33, dtype=dtype)
    weight = {"contiguous": whole, "transposed": whole.T, "sliced": whole[1:, 1:]}[layout]
    model = nn.Module()
    model.weight = nn.Parameter(weight)
    point = RestorePoint(model, CPU)
    point.take(unproven=True)
    assert not point.tensors._written()
    WRITES[write](model.weight)
    point.restore()
    assert point.lost == ["model.weight"]


def test_an_assignment_to_data_is_undone_without_a_copy():
    """Also after another one, for which the allocator may use the same address again."""
    model = nn.Linear(64, 64)
    point = RestorePoint(model, CPU)
    before, bias = model.weight.detach().clone(), model.bias.detach().clone()
    point.take()
    for _ in range(4):
        model.weight.data = model.weight.data * 2
    model.bias.data = torch.zeros(3)
    point.restore()
    assert not point.lost
    assert torch.equal(model.weight, before)
    assert torch.equal(model.bias, bias)
    assert not point.tensors._copies


def test_batch_norm_does_not_count_the_version_of_its_statistics():
    """Why the version cannot tell whether a buffer has changed."""
    norm = nn.BatchNorm1d(2)
    before, version = norm.running_mean.clone(), norm.running_mean._version
    norm(torch.randn(4, 2))
    assert not torch.equal(norm.running_mean, before)
    assert norm.running_mean._version == version


def test_a_replaced_buffer_is_restored():
    """Some models assign a new tensor instead of writing in place."""
    model = nn.Linear(1, 1)
    model.register_buffer("count", torch.zeros(()))
    point = RestorePoint(model, CPU)
    point.take()
    model.count = model.count + 5
    point.restore()
    assert model.count.item() == 0
    model.count += 1
    point.take()
    model.count += 1
    point.restore()
    assert model.count.item() == 1
