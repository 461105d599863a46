"""A step traced on fake tensors: what it measures, and what it leaves behind."""

import dataclasses
import sys

import pytest
import runs
import torch
from torch import nn

from trainapp.assembly.components import load_components
from trainapp.config.schema import ActivationCheckpointing, Config, Precision
from trainapp.losses.losses import classification
from trainapp.planning import step_peaks
from trainapp.planning.traced_run import trace
from trainapp.train import loop

GPT = (*runs.MODELS["gpt"], "batch.global_size=8", "memory.limit=1GiB", "train.grad_clip=null")


def traced_peak(config: Config, samples: int) -> int:
    """Bytes."""
    found = trace(config, load_components(config), samples, 0).training
    assert found is not None
    return found.total


@pytest.mark.parametrize("model", runs.MODELS)
def test_the_traced_peak_is_the_measured_one(tmp_path, model):
    # Whether gradients are clipped depends on their values, which a trace does not know.
    run = runs.prepare(tmp_path, *runs.MODELS[model], "memory.limit=1GiB", "train.grad_clip=null")
    traced = traced_peak(run.config, 16)
    loop.train_step(run)
    run.close()
    assert traced == run.memory.peak


def test_gradients_of_an_earlier_micro_batch_count(tmp_path):
    run = runs.prepare(tmp_path, *GPT, "batch.micro_size=4")
    traced = traced_peak(run.config, 4)
    loop.train_step(run)
    run.close()
    assert traced == run.memory.peak
    assert traced > traced_peak(run.config, 2)


@pytest.mark.parametrize("optimizer", ["adamw_8bit", "adamw_4bit"])
def test_state_in_bytes_is_allocated_before_the_first_step(tmp_path, optimizer):
    """As in a real run, where it is found to be zero: what is resident is known to the byte."""
    config = (*GPT, "model.width=64", "batch.micro_size=8", f"optimizer={optimizer}")
    run = runs.prepare(tmp_path, *config)
    traced = traced_peak(run.config, 8)
    loop.train_step(run)
    run.close()
    assert any("exp_avg_scale" in state for state in run.state.optimizer.state.values())
    assert traced == run.memory.peak


@pytest.mark.slow
def test_variants_in_a_process_of_their_own(tmp_path):
    """The advice's question: one peak per variant, none for one that cannot be built."""
    config = runs.configure(tmp_path, *GPT, "model.depth=4", "model.width=32")
    checkpointed = dataclasses.replace(config, activation_checkpointing=ActivationCheckpointing(mode="full"))
    wrong = dataclasses.replace(config, model=dataclasses.replace(config.model, arguments={"heads": 5}))
    bf16 = dataclasses.replace(config, precision=Precision(mode="bf16"))
    now, less, none, half = step_peaks.step_peaks([config, checkpointed, wrong, bf16], 8)
    assert now == traced_peak(config, 8)
    assert less < now
    assert none is None
    assert half < now


def test_no_variant_is_traced_once_the_time_is_up(tmp_path):
    config = runs.configure(tmp_path, *GPT)
    assert step_peaks.traced([config, config], 8, seconds=-1) == [None, None]
    first, second = step_peaks.traced([config, config], 8, seconds=60)
    assert first == second is not None


def test_without_the_first_variant_there_is_nothing_to_compare(tmp_path):
    config = runs.configure(tmp_path, *GPT)
    wrong = dataclasses.replace(config, model=dataclasses.replace(config.model, arguments={"heads": 5}))
    assert step_peaks.traced([wrong, config], 8, seconds=60) == [None, None]


def test_one_rank_of_several(tmp_path):
    """Its share of the batch, on the CPU, whatever the run's device is."""
    run = runs.prepare(tmp_path, *GPT, "batch.global_size=9")
    run.ranks.world = 2
    alone = step_peaks.of_one_rank(run)
    run.close()
    assert (alone.batch.global_size, alone.train.device, alone.parallel.nodes) == (5, "cpu", 1)


@pytest.mark.slow
def test_a_trace_leaves_nothing_behind(tmp_path):
    ends = []
    for traces in (False, True):
        run = runs.prepare(tmp_path / str(traces), *GPT)
        loop.train_step(run)
        if traces:
            assert step_peaks.step_peaks([dataclasses.replace(run.config, precision=Precision(mode="bf16"))], 8)[0]
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


def solves(model, batch):
    return classification(Solver(model), batch)


def never(model, batch):
    while float(batch["inputs"].sum()) != 0:
        pass


def test_a_model_that_reads_values_forever_ends_with_an_error(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "own_traced", sys.modules[__name__])
    for task in (solves, never):
        monkeypatch.setattr(task, "__module__", "own_traced")
    own = (*runs.MODELS["mlp"], "user_packages=[own_traced]")
    traced_peak(runs.configure(tmp_path, *own, "task=own_traced.solves"), 4)  # False ends this loop
    with pytest.raises(RuntimeError, match="reads values without end"):
        traced_peak(runs.configure(tmp_path, *own, "task=own_traced.never"), 4)
