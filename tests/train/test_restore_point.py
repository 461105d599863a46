"""The state that a step can restore: generators and buffers."""

import random

import numpy as np
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
    copies = [copy.data_ptr() for copy in point._copies]
    versions = [copy._version for copy in point._copies]
    model(torch.randn(4, 2))
    point.take()
    assert [copy.data_ptr() for copy in point._copies] == copies
    moved = [copy._version > version for copy, version in zip(point._copies, versions, strict=True)]
    assert moved == [True, True, True, False]  # running mean, variance and batch count; not the table


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
