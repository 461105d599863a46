import math

import pytest
import torch
from torch import nn

from trainapp.errors import UserError
from trainapp.hooks.metrics import EVERY
from trainapp.losses.contrastive import Contrastive
from trainapp.losses.losses import InChunks, classification, evaluate_metrics, next_token


class Fixed(nn.Module):
    """Returns the given logits."""

    def __init__(self, logits):
        super().__init__()
        self.logits = logits

    def forward(self, inputs):
        return self.logits


def test_classification_by_hand():
    model = Fixed(torch.tensor([[2.0, 0.0], [0.0, 1.0], [3.0, 0.0]]))
    targets = torch.tensor([0, 1, 1])
    loss, count, metrics = classification(model, {"inputs": torch.zeros(3, 1), "targets": targets})
    expected = math.log(1 + math.exp(-2)) + math.log(1 + math.exp(-1)) + math.log(1 + math.exp(3))
    assert float(loss) == pytest.approx(expected, rel=1e-6)  # a sum
    assert count == 3
    assert int(evaluate_metrics(metrics)["accuracy"]) == 2


def test_a_pair_is_a_batch_too():
    model, targets = Fixed(torch.randn(3, 2)), torch.tensor([0, 1, 1])
    named = classification(model, {"inputs": torch.zeros(3, 1), "targets": targets})
    assert classification(model, (torch.zeros(3, 1), targets))[0] == named[0]
    assert classification(model, [torch.zeros(3, 1), targets])[0] == named[0]


def test_next_token_counts_what_is_not_padding():
    logits = torch.zeros(2, 3, 4)
    logits[0, 0, 1] = 5.0
    targets = torch.tensor([[1, 2, -100], [0, -100, -100]])
    loss, count, metrics = next_token(Fixed(logits), {"inputs": targets, "targets": targets})
    right = math.log(1 + 3 * math.exp(-5))
    assert float(loss) == pytest.approx(right + 2 * math.log(4), rel=1e-5)
    assert int(count) == 3
    assert int(evaluate_metrics(metrics)["accuracy"]) == 2  # 1 at the first position; index 0 wins a tie of all


def test_a_batch_of_padding_alone_counts_nothing():
    targets = torch.full((2, 3), -100)
    loss, count, _ = next_token(Fixed(torch.randn(2, 3, 4)), {"inputs": targets, "targets": targets})
    assert float(loss) == 0
    assert int(count) == 0


def test_the_loss_is_computed_in_fp32():
    logits = torch.full((4, 8), 20.0, dtype=torch.bfloat16)
    logits[:, 0] = 20.25
    targets = torch.zeros(4, dtype=torch.int64)
    loss, _, _ = classification(Fixed(logits), {"inputs": targets, "targets": targets})
    assert loss.dtype == torch.float32
    assert float(loss) == pytest.approx(4 * math.log(1 + 7 * math.exp(-0.25)), rel=1e-6)


def test_metrics_hold_no_graph():
    logits = torch.randn(3, 2, requires_grad=True)
    targets = torch.tensor([0, 1, 1])
    _, _, metrics = classification(Fixed(logits), {"inputs": targets, "targets": targets})
    assert not evaluate_metrics({**metrics, "own": logits.sum()})["own"].requires_grad


@pytest.mark.parametrize(
    ("value", "form"), [(torch.ones(4), r"torch\.float32\[4\]"), ([1, 2], r"\[int, int\]"), ("a", "str")]
)
def test_a_metric_that_is_no_sum_is_refused_when_it_is_computed(value, form):
    with pytest.raises(UserError, match=rf"metric own must be .* but is {form}; return its \.sum\(\)"):
        evaluate_metrics({"own": lambda: value})


PRECISIONS = {torch.float64: torch.float64, torch.float32: torch.float32, torch.bfloat16: torch.float32}


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
@pytest.mark.parametrize("loss", [classification, next_token, Contrastive()], ids=["classes", "tokens", "contrastive"])
def test_a_loss_is_at_least_in_fp32_and_in_fp64_for_a_model_in_fp64(loss, dtype):
    expected = PRECISIONS[dtype]
    logits = torch.linspace(0, 1, 24, dtype=dtype).sin().view(2, 3, 4)
    if loss is classification:
        logits = logits.transpose(1, 2)
    targets = torch.tensor([[1, 2, -100], [0, 3, 1]])
    if isinstance(loss, Contrastive):
        logits = logits.flatten(0, 1)[:4]
    total, _, metrics = loss(Fixed(logits), {"inputs": torch.zeros(2, 2, 3), "targets": targets})
    assert total.dtype == expected
    if dtype is torch.float64:
        in_fp32, _, _ = loss(Fixed(logits.float()), {"inputs": torch.zeros(2, 2, 3), "targets": targets})
        assert 0 < abs(float(total) - float(in_fp32)) < 1e-4
    if EVERY in metrics:
        assert metrics[EVERY]()[0].dtype == expected


# --- targets that are no class


@pytest.mark.parametrize("target", [-1, 4])
@pytest.mark.parametrize("name", ["classification", "next_token", "in chunks"])
def test_targets_that_are_no_class_are_named(name, target):
    logits, targets = torch.zeros(2, 3, 4), torch.tensor([[1, 2, -100], [0, target, target]])
    batch = {"inputs": torch.zeros(2, 3, 5), "targets": targets}
    setting, compute = name, {"classification": classification, "next_token": next_token}.get(name)
    if name == "classification":
        logits = logits.transpose(1, 2)
    model = Fixed(logits)
    if name == "in chunks":
        setting, compute, model = "next_token", InChunks(next_token, 2), Headed()
    with pytest.raises(UserError) as error:
        compute(model, batch)
    message = str(error.value)
    assert message.startswith(f"task={setting}: a target is {target}, but must be a class from 0 to 3, or -100, which")
    assert ("write -100 for what is ignored, in place of -1" in message) == (target == -1)


class Headed(nn.Module):
    """Its last layer can be computed in chunks."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(5, 4)

    def features(self, inputs):
        return inputs

    def forward(self, inputs):
        return self.head(self.features(inputs))


def test_other_errors_of_the_loss_stay_as_they_are():
    with pytest.raises(ValueError, match="Expected input batch_size"):
        classification(Fixed(torch.zeros(3, 4)), {"inputs": torch.zeros(3), "targets": torch.tensor([0, 1])})


def test_the_arguments_of_a_metric_that_is_not_configured_say_so():
    arguments = torch.zeros(8, 5, dtype=torch.float64)
    assert not evaluate_metrics({"map": arguments}, stateful=("map",))
    no_metric = r"is torch.float64\[8, 5\]; return its .sum\(\). No metrics.map is configured: "
    with pytest.raises(UserError, match=no_metric) as error:
        evaluate_metrics({"map": arguments})
    assert "such as '+metrics.map={_target_: torchmetrics.F1Score, task: multiclass}'" in str(error.value)
