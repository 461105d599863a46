"""Frozen parameters stay as they are, and cost nothing but themselves."""

import pytest
import runs
import torch

from trainapp.memory.live_tensors import Category
from trainapp.planning import planner
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


# --- the mode of frozen modules

RESNET = (*runs.MODELS["resnet"], "model.freeze=[conv1,bn1,layer1,layer2.0.bn1,layer2.0.conv1.*]")
IN_EVALUATION = "model.freeze_mode=eval"


def stepped_statistics(run_dir, *overrides):
    """The running means before and after training, by name."""
    run = runs.prepare(run_dir, *RESNET, *overrides)
    before = {name: buffer.clone() for name, buffer in run.state.model.named_buffers() if name.endswith("running_mean")}
    loop.train(run)
    run.close()
    after = dict(run.state.model.named_buffers())
    return {name for name, mean in before.items() if not torch.equal(mean, after[name])}, set(before)


def is_frozen(name):
    return name.startswith(("bn1.", "layer1.", "layer2.0.bn1."))


def test_the_statistics_of_a_frozen_batchnorm_move_as_in_torch(tmp_path):
    moved, names = stepped_statistics(tmp_path)
    assert moved == names


def test_in_evaluation_mode_the_statistics_of_a_frozen_batchnorm_stay(tmp_path):
    """Also after an evaluation, and in a resumed run."""
    moved, names = stepped_statistics(tmp_path / "run", IN_EVALUATION, "every.eval=2")
    assert moved == {name for name in names if not is_frozen(name)}
    assert runs.differences(*runs.resumed(tmp_path, 2, *RESNET, IN_EVALUATION, "every.save=2", "every.eval=1")) == []
    statistics = runs.saved(tmp_path / "parts", 4)["model"]
    initial = runs.closed(tmp_path / "initial", *RESNET).state.model.state_dict()
    assert torch.equal(statistics["layer1.0.bn1.running_mean"], initial["layer1.0.bn1.running_mean"])
    assert not torch.equal(statistics["layer2.0.bn2.running_mean"], initial["layer2.0.bn2.running_mean"])


MODES_IN_TRAINING: list[bool] = []  # of the body, in forwards of the model in training mode


class Body(torch.nn.Module):
    """A frozen body with dropout, and BatchNorm without parameters; beside it, dropout that is no part of it."""

    def __init__(self, num_classes: int):
        super().__init__()
        norm = torch.nn.BatchNorm1d(16, affine=False)
        self.body = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 16), norm, torch.nn.Dropout(0.5))
        self.dropout = torch.nn.Dropout(0.5)
        self.head = torch.nn.Linear(16, num_classes)

    def forward(self, inputs):
        MODES_IN_TRAINING.extend([self.body.training] if self.training else [])
        return self.head(self.dropout(self.body(inputs)))


OWN = (*runs.own_model("test_frozen.Body"), "user_packages=[test_frozen]", "data=digits")


def test_the_parts_of_a_frozen_module_are_in_evaluation_mode(tmp_path):
    run = runs.closed(tmp_path, *OWN, "model.freeze=[body]", IN_EVALUATION)
    modes = {name: module.training for name, module in run.state.model.named_modules()}
    assert {name for name, training in modes.items() if training} == {"", "dropout", "head"}


def test_evaluation_mode_is_refused_where_no_module_is_frozen_whole(tmp_path):
    message = runs.refusal(tmp_path, *OWN, "model.freeze=[body.1.bias]", IN_EVALUATION)
    assert message.startswith("model.freeze_mode=eval: no module has only frozen parameters")


@pytest.mark.parametrize(("overrides", "training"), [((), True), ((IN_EVALUATION,), False)])
def test_a_plan_has_the_modes_of_the_run(tmp_path, overrides, training):
    chosen = (*OWN, "model.freeze=[body]", "plan.techniques=false", *overrides)
    MODES_IN_TRAINING.clear()
    planner.plan(runs.configure(tmp_path, *chosen))
    assert set(MODES_IN_TRAINING) == {training}
