"""What a batch of four samples and its parts show of a loss, in one precision."""

import own_tasks
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from trainapp.draws.record import DrawRecord
from trainapp.losses.losses import CheckedTask
from trainapp.training.evaluation.loop import EVALUATION
from trainapp.trials.messages import Refused
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
