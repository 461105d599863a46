"""A compiled model with a budget of activations: a recovery and a resumed run compile again, within the budget."""

import logging
import shutil

import pytest
import runs
import torch
import writing_models

from .conftest import MODELS, tiny
from .inject import Recorded

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (shutil.which("g++") or shutil.which("clang++")), reason="torch.compile needs a C++ compiler"
    ),
    pytest.mark.usefixtures("without_pictures"),
]
COMPILED = (*MODELS["mlp"], "model.depth=4", "model.dropout=0", "train.compile=true", "train.max_steps=9")
FAILING = ("task=writing_models.Failing", "user_packages=[writing_models]")
# Of a micro-batch of 8, less than half of what is saved by default; all of a smaller one.
BUDGET = ("activation_checkpointing=budget", "activation_checkpointing.bytes=1200")


def shares(caplog):
    """The values of torch's budget that were chosen, in order."""
    return [record.args[2] for record in caplog.records if "activation_memory_budget" in record.message]


def test_the_smaller_micro_batch_is_compiled_within_the_budget(tmp_path, monkeypatch, caplog):
    torch.compiler.reset()
    monkeypatch.setattr(writing_models.Failing, "fails_at", 2 * 5)  # in the second micro-batch of step 5
    with caplog.at_level(logging.INFO):
        recorded = Recorded(tiny(tmp_path / "a", *COMPILED, *BUDGET, *FAILING))
    (failure,) = recorded.failures
    assert (failure.step, failure.old_size, failure.new_size) == (5, 8, 4)
    first, second = shares(caplog)
    assert first < second
    torch.compiler.reset()
    plain = Recorded(tiny(tmp_path / "b", *COMPILED, *FAILING, schedule={5: 4}))
    found, expected = runs.weights(recorded.run.state.model), runs.weights(plain.run.state.model)
    assert runs.relative_error(found, expected) < 1e-5
    other = Recorded(tiny(tmp_path / "c", *COMPILED, *FAILING, "train.seed=1"))
    assert runs.relative_error(runs.weights(other.run.state.model), expected) > 1e-3


def test_a_resumed_run_compiles_within_the_budget(tmp_path, caplog):
    overrides = (*COMPILED, *BUDGET, "checkpointing=standard", "every.save=5")
    torch.compiler.reset()
    whole = runs.run_until(tmp_path / "whole", 12, *overrides, "train.max_steps=12")
    torch.compiler.reset()
    runs.run_until(tmp_path / "parts", 5, *overrides, "train.max_steps=12")
    torch.compiler.reset()
    caplog.clear()
    with caplog.at_level(logging.INFO):
        resumed = runs.run_until(tmp_path / "parts", 12, *overrides, "train.max_steps=12")
    assert resumed.state.progress.step == 12
    (share,) = shares(caplog)
    assert share < 1
    assert runs.relative_error(runs.weights(resumed.state.model), runs.weights(whole.state.model)) < 1e-5
