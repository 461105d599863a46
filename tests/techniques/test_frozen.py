"""Frozen parameters stay as they are, and cost nothing but themselves."""

import pytest
import runs
import torch

from trainapp.memory.live_tensors import Category
from trainapp.training import loop

GPT = (*runs.MODELS["gpt"], "model.depth=3", "model.dropout=0", "model.tie_embeddings=false", "memory.limit=1GiB")


@pytest.mark.parametrize(
    ("patterns", "frozen"),
    [
        (["head"], {"head.weight", "head.bias"}),
        (["head.bias"], {"head.bias"}),
        (["layers.0"], {"layers.0.0.weight", "layers.0.0.bias"}),
        (["layers.*.bias", "head"], {"layers.0.0.bias", "layers.1.0.bias", "head.weight", "head.bias"}),
    ],
)
def test_names(tmp_path, patterns, frozen):
    run = runs.closed(tmp_path, *runs.MODELS["mlp"], "model.depth=3", f"model.freeze={patterns}")
    assert {name for name, p in run.state.model.named_parameters() if not p.requires_grad} == frozen


@pytest.mark.parametrize("pattern", ["layer", "layers.9", "heads*", ""])
def test_a_name_of_nothing_is_refused(tmp_path, pattern):
    message = runs.refusal(tmp_path, *runs.MODELS["mlp"], f"model.freeze=['{pattern}']")
    assert message.startswith(f"model.freeze=[{pattern}]: MLP has no parameter or module of this name; its top")


def test_nothing_left_to_train_is_refused(tmp_path):
    assert "nothing to train" in runs.refusal(tmp_path, *runs.MODELS["mlp"], "model.freeze=['*']")


@pytest.mark.parametrize("name", ["embedding", "head", "head.weight"])
def test_a_tied_weight_is_frozen_by_either_name(tmp_path, name):
    run = runs.closed(tmp_path, *runs.MODELS["gpt"], f"model.freeze=[{name}]")
    assert not run.state.model.embedding.weight.requires_grad


def stepped(run_dir, *overrides):
    run = runs.prepare(run_dir, *GPT, *overrides)
    before = {name: p.detach().clone() for name, p in run.state.model.named_parameters()}
    loop.train_step(run)
    run.close()
    moved = {name for name, p in run.state.model.named_parameters() if not torch.equal(p, before[name])}
    return run, moved


def test_only_the_rest_is_trained_and_has_state(tmp_path):
    run, moved = stepped(tmp_path, "model.freeze=[embedding,layers.0,layers.1]")
    names = {name for name, _ in run.state.model.named_parameters()}
    frozen = {name for name in names if name.startswith(("embedding", "layers.0", "layers.1"))}
    assert moved == names - frozen
    trained = sum(p.numel() for name, p in run.state.model.named_parameters() if name not in frozen)
    static = run.meter.static
    assert static[Category.GRADIENTS] == 4 * trained
    assert 8 * trained <= static[Category.OPTIMIZER_STATE] < 8.2 * trained  # two moments, and the step counts


def test_gradients_are_those_of_the_whole_model(tmp_path):
    frozen = runs.prepare(tmp_path / "frozen", *GPT, "model.freeze=[embedding,layers.0]")
    whole = runs.prepare(tmp_path / "whole", *GPT)
    for run in (frozen, whole):
        runs.accumulate(run)
        run.close()
    expected = dict(whole.state.model.named_parameters())
    for name, parameter in frozen.state.model.named_parameters():
        if name.startswith(("embedding", "layers.0")):
            assert parameter.grad is None
        else:
            assert torch.equal(parameter.grad, expected[name].grad)


def activations(run_dir, *overrides):
    """The peak of a step beyond what persists."""
    run, _ = stepped(run_dir, *overrides)
    return run.memory.peak - sum(run.meter.static.values())


def test_activations_before_the_first_trained_parameter_are_not_saved(tmp_path):
    chosen = ("optimizer=sgd", "optimizer.momentum=0", "optimizer.nesterov=false")
    whole = activations(tmp_path / "whole", *chosen)
    first = activations(tmp_path / "first", *chosen, "model.freeze=[embedding,layers.0,layers.1]")
    # Negative control: what lies behind a trained parameter is saved for its sake.
    last = activations(tmp_path / "last", *chosen, "model.freeze=[layers.1,layers.2]")
    assert first < 0.6 * whole
    assert first < 0.8 * last
