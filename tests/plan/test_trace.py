"""A step traced on fake tensors: what it measures, and what it leaves behind."""

import dataclasses

import pytest
import runs
import torch
from torch import nn

from trainapp.config.schema import ActivationCheckpointing, Precision
from trainapp.plan.trace import traced_peak
from trainapp.train import loop

GPT = (*runs.MODELS["gpt"], "batch.global_size=8", "memory.limit=1GiB", "train.grad_clip=null")


@pytest.mark.parametrize("model", runs.MODELS)
def test_the_traced_peak_is_the_measured_one(tmp_path, model):
    # Whether gradients are clipped depends on their values, which a trace does not know.
    run = runs.prepare(tmp_path, *runs.MODELS[model], "memory.limit=1GiB", "train.grad_clip=null")
    traced = traced_peak(run, 16)
    loop.train_step(run)
    run.close()
    assert traced == run.memory.peak


def test_gradients_of_an_earlier_micro_batch_count(tmp_path):
    run = runs.prepare(tmp_path, *GPT, "batch.micro_size=4")
    traced = traced_peak(run, 4)
    loop.train_step(run)
    run.close()
    assert traced == pytest.approx(run.memory.peak, abs=64)  # the sums of loss and count
    assert traced > traced_peak(run, 2)


def test_other_settings(tmp_path):
    run = runs.prepare(tmp_path, *GPT, "model.depth=4", "model.width=32")
    now = traced_peak(run, 8)
    assert traced_peak(run, 8, activation_checkpointing=ActivationCheckpointing(mode="full")) < now
    assert traced_peak(run, 8, precision=Precision(mode="bf16")) < now
    run.close()


def test_a_trace_leaves_nothing_behind(tmp_path):
    ends = []
    for traces in (False, True):
        run = runs.prepare(tmp_path / str(traces), *GPT)
        loop.train_step(run)
        if traces:
            traced_peak(run, 8, precision=Precision(mode="bf16"))
        loop.train_step(run)
        run.close()
        ends.append({"model": run.state.model.state_dict(), "rng": torch.get_rng_state()})
    assert runs.differences(*ends) == []


class Solver(nn.Module):
    """Iterates to convergence, as an implicit layer does."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, inputs):
        x = self.model(inputs)
        while x.abs().max() > 1e-3:
            x = x / 2
        return x


def test_a_model_that_reads_values_forever_ends_with_an_error(tmp_path):
    run = runs.prepare(tmp_path, *runs.MODELS["mlp"])
    task = run.task

    def solves(model, batch):
        return task(Solver(model), batch)

    def never(model, batch):
        while float(batch["inputs"].sum()) != 0:
            pass

    traced_peak(dataclasses.replace(run, task=solves), 4)  # False ends this loop
    with pytest.raises(RuntimeError, match="reads values without end"):
        traced_peak(dataclasses.replace(run, task=never), 4)
    run.close()
