"""The loss in chunks is the loss: its value, its gradients, the accuracy; only memory differs."""

import pytest
import runs
import torch
import torch.nn.functional as F
from helpers import evaluations, metrics
from torch import nn

from trainapp.errors import UserError
from trainapp.losses import losses
from trainapp.losses.losses import InChunks, classification
from trainapp.memory.live_tensors import Category, LiveTensors
from trainapp.techniques.catalogue import Situation, available
from trainapp.techniques.chunked_loss import (
    features_only,
    linear_cross_entropy,
    require_head,
    require_same_forward,
)

# How far gradients may differ: the order of additions in fp32; the rounding of the weight's gradient in bf16.
TOLERANCES = {None: 1e-6, torch.bfloat16: 5e-3}
PADDED = (*runs.MODELS["gpt"], "data.min_length=3", "batch.global_size=16")


def problem(bias=True, width=24, classes=100):
    torch.manual_seed(0)
    head, features = nn.Linear(width, classes, bias=bias), torch.randn(3, 7, width, requires_grad=True)
    targets = torch.randint(0, classes, (3, 7))
    targets[0, 2:] = -100
    return head, features, targets


def plainly(head, features, targets):
    logits = head(features).float()
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return loss, (logits.argmax(-1) == targets).sum()


def error(compute, dtype, bias=True):
    """The largest relative difference from the plain loss, among loss and gradients; accuracy must be equal."""
    head, features, targets = problem(bias)
    inputs = [features, *head.parameters()]
    results = []
    for function in (plainly, compute):
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            loss, correct = function(head, features, targets)
        assert loss.dtype == torch.float32
        results.append([loss.detach().view(1), *torch.autograd.grad(loss * 0.3, inputs), correct.view(1)])
    (*expected, right), (*found, counted) = results
    assert right == counted
    return max(runs.relative_error(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 4, 5, 20, 21, 1000, "auto"])
def test_loss_gradients_and_accuracy(dtype, bias, rows):
    assert error(lambda h, f, t: linear_cross_entropy(f, h, t, rows), dtype, bias) <= TOLERANCES[dtype]


def test_it_is_computed_in_fp64_for_a_model_in_fp64():
    head, features, targets = problem()
    head.double()
    inputs = features.double().detach().requires_grad_()
    loss, _ = linear_cross_entropy(inputs, head, targets, 4)
    expected = F.cross_entropy(head(inputs).flatten(0, 1), targets.flatten(), reduction="sum")
    assert loss.dtype == torch.float64
    assert float(loss) == pytest.approx(float(expected), rel=1e-14)
    parameters = [inputs, *head.parameters()]
    gradients, expected_gradients = (torch.autograd.grad(value, parameters) for value in (loss, expected))
    assert max(map(runs.relative_error, gradients, expected_gradients)) < 1e-14


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_wrong_variants_are_beyond_the_tolerance(dtype):
    # Negative controls: one target without its gradient; padding that counts as class 0.
    def without_one(head, features, targets):
        loss, correct = plainly(head, features, targets)
        return loss - F.cross_entropy(head(features[2, 6]).float(), targets[2, 6]), correct

    def counts_padding(head, features, targets):
        _, correct = plainly(head, features, targets)
        return linear_cross_entropy(features, head, targets.clamp(min=0), 4)[0], correct

    for wrong in (without_one, counts_padding):
        assert error(wrong, dtype) > 10 * TOLERANCES[dtype]


def test_nothing_counts():
    head, features, targets = problem()
    loss, correct = linear_cross_entropy(features, head, torch.full_like(targets, -100), 4)
    loss.backward()
    assert (loss.item(), correct.item()) == (0, 0)
    assert not any(t.grad.any() for t in (features, *head.parameters()))


@pytest.mark.parametrize("target", [100, -1, -99])
def test_a_target_that_is_no_class_is_an_error_as_ever(target):
    head, features, targets = problem()
    targets[1, 1] = target
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        plainly(head, features, targets)
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        linear_cross_entropy(features, head, targets, 4)


def test_frozen_parts_get_no_gradient():
    head, features, targets = problem()
    head.weight.requires_grad_(False)
    linear_cross_entropy(features, head, targets, 4)[0].backward()
    assert head.weight.grad is None
    assert head.bias.grad is not None
    head.requires_grad_(False)
    assert not linear_cross_entropy(features.detach(), head, targets, 4)[0].requires_grad


def peak(rows):
    head, features, targets = problem(width=32, classes=2000)
    features = torch.randn(8, 128, 32, requires_grad=True)
    targets = torch.zeros(8, 128, dtype=torch.int64)
    counter = LiveTensors()
    counter.register({Category.PARAMETERS: head.parameters(), Category.ACTIVATIONS: [features]})
    with counter:
        if rows is None:
            loss, _ = plainly(head, features, targets)
        else:
            loss, _ = linear_cross_entropy(features, head, targets, rows)
        loss.backward()
    return counter.peak


def test_memory():
    logits = 8 * 128 * 2000 * 4
    assert peak(None) > 2 * logits
    assert peak("auto") < 0.75 * logits
    assert peak(8 * 128) < peak(None)


# In a run


def accumulated(run_dir, *overrides):
    run = runs.prepare(run_dir, *overrides, "train.check_exactness=false")
    totals = runs.accumulate(run, is_logged=True)
    run.close()
    return totals, runs.gradients(run.state.model)


@pytest.mark.parametrize("tied", ["true", "false"])
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-6), ("bf16", 1e-2), ("fp16", 1e-2)])
def test_a_step_of_gpt(tmp_path, precision, tolerance, tied):
    overrides = (*PADDED, "model.dropout=0", f"precision={precision}", f"model.tie_embeddings={tied}")
    overrides += ("precision.initial_scale=64",) if precision == "fp16" else ()  # none shall overflow
    expected, gradients = accumulated(tmp_path / "plain", *overrides)
    totals, own = accumulated(tmp_path / "chunks", *overrides, "memory.loss_chunk=5", "batch.micro_size=7")
    assert float(totals.loss) == pytest.approx(float(expected.loss), rel=tolerance)
    assert totals.count == expected.count
    assert abs(totals.metrics["accuracy"][0] - expected.metrics["accuracy"][0]) <= (precision != "fp32")
    assert runs.relative_error(own, gradients) <= tolerance
    _, other = accumulated(tmp_path / "control", *overrides, "train.seed=1")
    assert runs.relative_error(other, gradients) > 10 * tolerance


def test_a_whole_run_and_its_evaluation(tmp_path):
    for name, setting in (("plain", "null"), ("chunks", "5")):
        runs.run(tmp_path / name, *PADDED, "train.max_steps=3", "every.eval=3", f"memory.loss_chunk={setting}")
    for read in (metrics, evaluations):
        lines = zip(read(tmp_path / "plain"), read(tmp_path / "chunks"), strict=True)
        values = [(a[name], b[name]) for a, b in lines for name in ("loss", "accuracy")]
        assert values
        for plain, chunks in values:
            assert chunks == pytest.approx(plain, rel=1e-5)


class Classifier(nn.Module):
    """Any model that exposes features and head."""

    def __init__(self, image_shape=(1, 8, 8), num_classes=10):
        super().__init__()
        self.trunk, self.head = nn.Linear(64, 16), nn.Linear(16, num_classes)

    def features(self, inputs):
        return self.trunk(inputs.flatten(1)).relu()

    def forward(self, inputs):
        return self.head(self.features(inputs))


def test_classification():
    torch.manual_seed(0)
    model, batch = Classifier(), (torch.randn(9, 1, 8, 8), torch.randint(0, 10, (9,)))
    loss, count, found = classification(model, batch)
    other, other_count, other_found = InChunks(classification, 4)(model, batch)
    assert float(other) == pytest.approx(float(loss), rel=1e-6)
    assert count == other_count == 9
    assert losses.evaluate_metrics(found) == losses.evaluate_metrics(other_found)


def test_the_model_is_called_and_left_as_it_was():
    model, inputs = Classifier(), torch.randn(2, 64)
    calls = []
    model.register_forward_hook(lambda module, inputs, output: calls.append(output.shape))
    with features_only(model):
        assert model(inputs).shape == (2, 16)
    assert calls == [(2, 16)]
    with pytest.raises(ZeroDivisionError), features_only(model):
        1 / 0  # noqa: B018
    assert "forward" not in vars(model)
    assert model(inputs).shape == (2, 10)


def test_a_task_of_ones_own_is_refused(tmp_path):
    overrides = (*PADDED, "task=own_tasks.cross_entropy", "user_packages=[own_tasks]", "memory.loss_chunk=4")
    with pytest.raises(UserError, match=r"memory.loss_chunk=4: the task computes its own loss; call trainapp.tasks"):
        runs.prepare(tmp_path, *overrides)


def test_another_head_than_a_plain_linear_layer_is_refused(tmp_path):
    """The weight of one with hooks is set before each call of the head, or its gradient changed after it."""
    config = runs.configure(tmp_path, "memory.loss_chunk=4")
    model = Classifier()
    require_head(config, model)
    model.head = nn.Sequential(nn.Linear(16, 10))
    with pytest.raises(UserError, match=r"plain nn\.Linear, but is a Sequential"):
        require_head(config, model)
    for change in (torch.nn.utils.weight_norm, lambda head: head.register_forward_hook(print)):
        model = Classifier()
        change(model.head)
        with pytest.raises(UserError, match=r"plain nn\.Linear, but is a Linear with hooks"):
            require_head(config, model)
        assert "memory.loss_chunk=auto" not in offered(model, tmp_path)
    model = Classifier()
    torch.nn.utils.parametrizations.weight_norm(model.head)
    require_head(config, model)
    assert "memory.loss_chunk=auto" in offered(model, tmp_path)


def offered(model, folder):
    situation = Situation(runs.configure(folder), model, knows_loss=True)
    return {own.setting for own in available(situation)}


@pytest.mark.slow
def test_a_compiled_model(tmp_path):
    torch.compiler.reset()
    overrides = (*PADDED, "model.dropout=0", "memory.loss_chunk=5")
    for name in ("false", "true"):
        runs.run(tmp_path / name, *overrides, f"train.compile={name}", "train.max_steps=2")
    plain, compiled = ([line["loss"] for line in metrics(tmp_path / name)] for name in ("false", "true"))
    assert compiled == pytest.approx(plain, rel=1e-4)


class Separate(nn.Module):
    """Its forward is its head after its features, and then something more."""

    def __init__(self, more=None, hook=None):
        super().__init__()
        self.body, self.head, self.more = nn.Linear(4, 8), nn.Linear(8, 5), more
        self.register_buffer("calls", torch.zeros(()))
        if hook:
            self.head.register_forward_hook(hook)

    def features(self, inputs):
        self.calls += 1
        return torch.dropout(self.body(inputs), 0.5, self.training)

    def forward(self, inputs):
        logits = self.head(self.features(inputs))
        return logits if self.more is None else self.more(logits)


@pytest.mark.parametrize(
    "arguments",
    [
        {"more": lambda logits: logits * 0.1},
        {"more": lambda logits: 30 * torch.tanh(logits / 30)},
        {"more": lambda logits: torch.dropout(logits, 0.5, True)},
        {"more": lambda logits: logits[..., :3]},
        {"hook": lambda module, inputs, output: output * 0.1},
    ],
    ids=["scale", "cap", "dropout", "fewer", "hook"],
)
def test_a_model_whose_forward_is_more_than_its_head_is_refused(arguments):
    with pytest.raises(UserError, match=r"^memory\.loss_chunk=auto: Separate's forward\(inputs\) is not head"):
        require_same_forward(Separate(**arguments), torch.randn(2, 4), "auto")


def test_comparing_leaves_no_trace():
    model, inputs = Separate(), torch.randn(2, 4)
    before = torch.get_rng_state()
    require_same_forward(model, inputs, 64)
    assert torch.equal(torch.get_rng_state(), before)
    assert float(model.calls) == 0


def test_a_run_compares_before_it_begins(tmp_path):
    own = ("model._target_=own_models.ScaledHead", "user_packages=[own_models]")
    runs.prepare(tmp_path / "plain", *runs.MODELS["gpt"], *own).close()
    with pytest.raises(UserError, match="is not head"):
        runs.prepare(tmp_path, *runs.MODELS["gpt"], *own, "memory.loss_chunk=auto")
