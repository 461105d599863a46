"""What a batch of four samples and its parts show of a loss, in one precision."""

import functools
import math
import re

import own_tasks
import pytest
import runs
import torch
from torch import nn
from torch.nn import functional as F

from trainapp.draws.record import DrawRecord
from trainapp.losses.losses import CheckedTask
from trainapp.training.evaluation.loop import EVALUATION
from trainapp.trials.gradients import GradientBalance
from trainapp.trials.messages import Inexactness, Refused
from trainapp.trials.modes import Mode
from trainapp.trials.parts import compare_with_parts
from trainapp.trials.precisions import probe_in_fp64
from trainapp.trials.probe import ProbeInputs, TaskProbe
from trainapp.trials.samples import first_samples

PRECISIONS = pytest.mark.parametrize("precision", ["fp64", "fp32"])


class Detections(torch.utils.data.Dataset):
    """Samples with numbers of matched priors of their own."""

    def __init__(self, matched):
        self.matched = matched

    def __len__(self):
        return len(self.matched)

    def __getitem__(self, index):
        inputs = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return {"inputs": inputs, "targets": torch.tensor(index % 3), "matched": torch.tensor(self.matched[index])}


def linear():
    torch.manual_seed(0)
    return nn.Linear(8, 3)


def findings_of(task, samples, precision="fp64", model=None, training=False):
    """What the comparisons say of a task in a precision."""
    checked_task = CheckedTask(task, "task=mine")
    inputs = ProbeInputs(checked_task, model or linear(), samples, torch.device("cpu"), 0)
    probe = probe_in_fp64(inputs, noise=0.0) if precision == "fp64" else TaskProbe(inputs)
    return compare_with_parts(probe, Mode(checked_task, EVALUATION, training), DrawRecord())


def cross_entropies(model, batch):
    return F.cross_entropy(model(batch["inputs"]), batch["targets"], reduction="none")


def mean_over_matched(model, batch):
    """As in a port of SSD: divided by the matched priors of the batch, times its samples."""
    losses = cross_entropies(model, batch)
    return losses.sum() / batch["matched"].sum() * len(losses), len(losses), {}


def sum_over_matched(model, batch):
    return cross_entropies(model, batch).sum(), batch["matched"].sum(), {}


@PRECISIONS
@pytest.mark.parametrize("matched", [(2, 2, 3, 1), (2, 2, 1, 3), (3, 1, 2, 2), (1, 1, 1, 2)])
def test_numbers_that_add_up_in_two_cuts_by_coincidence(matched, precision):
    """2 + 2 = 3 + 1, and the first is their mean: halves add up, and so does the first sample with the others."""
    samples = first_samples(Detections(matched), range(4), 0)
    finding = findings_of(mean_over_matched, samples, precision).loss
    assert isinstance(finding, Refused)
    assert "the loss is not a sum over samples" in finding.message
    assert str(findings_of(sum_over_matched, samples, precision).loss).startswith("adds up over 4 samples")


def refusing_one(model, batch):
    losses = cross_entropies(model, batch)
    if len(losses) == 1:
        raise ValueError("a single sample")
    return losses.sum(), len(losses), {}


@pytest.mark.parametrize(
    ("task", "refused"),
    [
        (refusing_one, "1 sample (ValueError: a single sample)"),
        (own_tasks.asserting, '3 samples (AssertionError: assert 16 % len(batch["targets"]) == 0)'),
    ],
)
def test_what_refuses_unequal_parts_is_named(task, refused):
    samples = first_samples(Detections((1, 1, 1, 1)), range(4), 0)
    text = str(findings_of(task, samples).loss)
    assert text.endswith(f"; compared in halves alone: the task or the model refuses {refused}")


# --- what adds up, but less exactly than rounding explains


def adaptive(tolerance, model, batch):
    """As a solver whose error norm is taken over the batch: the last step it takes is smaller than the tolerance."""
    logits = model(batch["inputs"])
    logits = logits + tolerance * logits.detach().norm() * logits.sin()
    return F.cross_entropy(logits, batch["targets"], reduction="sum"), len(logits), {}


def with_control_in_fp32(tolerance, model, batch):
    """As in torchdiffeq: its step sizes are scalars in fp32."""
    step = torch.tensor(0.5, dtype=torch.float32) * 2
    return adaptive(tolerance * step, model, batch)


def cast_to_fp32(model, batch):
    return cross_entropies(model, batch).sum().float(), len(batch["targets"]), {}


def fp32_inside(model, batch):
    logits = F.layer_norm(model(batch["inputs"]).float(), (3,)).to(torch.get_default_dtype())
    return F.cross_entropy(logits, batch["targets"], reduction="sum"), len(logits), {}


def test_what_adds_up_to_less_than_fp64s_rounding_says_so():
    samples = first_samples(Detections((1, 1, 1, 1)), range(4), 0)
    finding = findings_of(functools.partial(adaptive, 1e-8), samples).loss
    assert re.match(
        r"adds up over 4 samples, as does its count, to \de-\d\d only \(what a sample gets depends a", str(finding)
    )
    assert not finding.inexactness.is_rounding
    mode = Mode(CheckedTask(own_tasks.total, "task=mine"), EVALUATION, False)
    assert "to 4e-09 only, in fp64: what a sample" in Inexactness(4e-9, False).message(mode, 4)
    for tolerance in (1e-8, 1e-4):  # the rounding of its scalars explains none of it
        finding = findings_of(functools.partial(with_control_in_fp32, tolerance), samples).loss
        assert not finding.inexactness.is_rounding
    exact = findings_of(functools.partial(adaptive, 0), samples).loss
    assert (str(exact), exact.inexactness) == ("adds up over 4 samples, as does its count", None)
    refused = findings_of(functools.partial(adaptive, 1e-3), samples).loss
    assert (
        "An adaptive solver whose tolerance is over the batch (torchdiffeq's dopri5) does this, too" in refused.message
    )
    assert (
        "adaptive"
        not in findings_of(mean_over_matched, first_samples(Detections((1, 1, 1, 2)), range(4), 0)).loss.message
    )


@pytest.mark.parametrize("task", [fp32_inside, cast_to_fp32])
def test_a_part_in_fp32_is_told_from_it(task):
    """Rounding of its own, by which nothing depends on the micro-batch."""
    samples = first_samples(Detections((1, 1, 1, 1)), range(4), 0)
    finding = findings_of(task, samples).loss
    assert finding.inexactness is None or finding.inexactness.is_rounding
    text = str(Inexactness(4e-8, is_rounding=True))
    assert text.startswith(
        "to 4e-08 only (a part computes in less than fp64, whose rounding may hide that what a sample"
    )


HERE = "user_packages=[own_tasks]"
NET = (*runs.own_model("own_tasks.Net"), HERE, "data=digits", "train.max_steps=1")


@pytest.mark.parametrize(("task", "topic"), [("adaptive", "sum of "), ("normalises_gradients", "gradients of ")])
def test_a_run_says_that_it_depends_on_the_micro_batch(tmp_path, caplog, task, topic):
    result = runs.run(tmp_path, *NET, f"task=own_tasks.{task}")
    (text,) = result.depends_on_micro_batch
    checks = runs.closed(tmp_path / "again", *NET, f"task=own_tasks.{task}").checks
    assert text.startswith(f"task=own_tasks.{task}: the ")
    if topic == "sum of ":
        assert "is that of their halves to" in text
        assert " only (what a sample gets depends a little on the others" in checks["loss"]
        assert " only (what a sample gets depends a little on the others" in checks["loss in training"]
    else:
        assert "the gradients of 4 samples are not the sum of those of their halves, though the losses are" in text
        assert "gradients" not in checks["loss"]
        assert "; its gradients do not add up (they differ by " in checks["loss in training"]
        assert text in caplog.text


HOOKED = (*runs.own_model("own_tasks.NetWithHooks"), HERE, "data=digits", "train.max_steps=1", "task=own_tasks.total")


@pytest.mark.parametrize("hook", ["clamps", "normalises", "multiplies the sum"])
def test_hooks_on_parameters_are_compared(tmp_path, caplog, hook):
    """They see the gradient of a micro-batch, or what has accumulated so far."""
    result = runs.run(tmp_path, *HOOKED, f"+model.hook={hook}")
    (text,) = result.depends_on_micro_batch
    assert "the gradients of 4 samples are not the sum of those of their halves" in text
    assert "A hook on a parameter (register_hook, register_post_accumulate_grad_hook) that clips or scales" in text
    assert "train.grad_clip" in text
    assert text in caplog.text


@pytest.mark.parametrize("hook", ["scales", "masks the sum"])
def test_linear_hooks_are_fine(tmp_path, hook):
    assert runs.run(tmp_path, *HOOKED, f"+model.hook={hook}").depends_on_micro_batch == []


@pytest.mark.parametrize("hook", ["multiplies the sum", "clamps"])
def test_hooks_after_accumulation_are_named_where_nothing_is_compared(tmp_path, hook):
    result = runs.run(tmp_path, *HOOKED, f"+model.hook={hook}", "train.check_loss=false")
    texts = [text for text in result.depends_on_micro_batch if "hooks" in text]
    if hook == "clamps":
        assert texts == []
    else:
        (text,) = texts
        assert "hooks of register_post_accumulate_grad_hook on head.weight run once per micro-batch and rank" in text


@pytest.mark.parametrize("factor", [math.inf, math.nan])
def test_gradients_that_are_not_finite_are_not_compared(factor):
    """Neither where only those of the whole batch are not."""
    leaf = torch.ones(2, dtype=torch.float64, requires_grad=True)
    balance = GradientBalance([leaf])
    balance.add_whole((factor * leaf).sum())
    balance.add_part(leaf.sum())
    balance.add_part(leaf.sum())
    assert math.isnan(balance.deviation)
