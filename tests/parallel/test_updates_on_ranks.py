"""Several optimizers on several ranks: as on one, also with an error on one rank in either update."""

import weakref

import pytest
import torch
import torch.distributed as dist
from faults import Fault
from zoo.gans import generate

from .conftest import TINY, needs_reset
from .test_equality import assert_same, error


def updates(generator="zoo.gans.generate"):
    """Both, with the generator's task."""
    entries = (("discriminator", "zoo.gans.discriminate", 0.1), ("generator", generator, 0.2))
    texts = (
        f"{{name: {name}, task: {task}, parameters: [{name}], optimizer: {{lr: {rate}}}}}"
        for name, task, rate in entries
    )
    return f"updates=[{', '.join(texts)}]"


OWN = (
    *("user_packages=[zoo,parallel]", "model._target_=zoo.gans.SteadyGAN", "data._target_=zoo.data.Vectors"),
    "task=zoo.gans.distance",
)


def run(cell, world, *overrides, generator="zoo.gans.generate", **options):
    return cell.run(world, *OWN, updates(generator), *overrides, tiny=TINY, **options)


class Failing(torch.autograd.Function):
    """Memory runs out in the backward."""

    @staticmethod
    def forward(context, loss):
        return loss.clone()

    @staticmethod
    def backward(context, gradient):
        raise torch.OutOfMemoryError("CUDA out of memory. (injected)")


CALLS = weakref.WeakKeyDictionary()  # of the generator's task, by model


def failing(model, batch):
    """The generator's loss; on rank 1, its fourth backward fails: in the second step's last micro-batch."""
    loss, count, sums = generate(model, batch)
    if torch.is_grad_enabled():
        CALLS[model] = CALLS.get(model, 0) + 1
        if dist.is_initialized() and dist.get_rank() == 1 and CALLS[model] == 4:
            loss = Failing.apply(loss)
    return loss, count, sums


@pytest.mark.slow
@pytest.mark.parametrize("spread", ["ddp", pytest.param("fsdp", marks=needs_reset)])
def test_as_one_process(cell, spread):
    """Gradients of each update, weights and samples."""
    (reference,) = run(cell, 0, "train.ema=0.5")
    assert len(reference.gradients) == 8  # four steps of two updates
    assert reference.gradients[0].shape != reference.gradients[1].shape
    assert_same(run(cell, 2, f"parallel={spread}", "train.ema=0.5"), reference)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spread", "update"), [("ddp", "discriminator"), pytest.param("fsdp", "generator", marks=needs_reset)]
)
def test_an_error_on_one_rank_in_either_update(cell, spread, update):
    (reference,) = run(cell, 0)
    if update == "generator":
        records = run(cell, 2, f"parallel={spread}", generator="parallel.test_updates_on_ranks.failing")
    else:
        records = run(cell, 2, f"parallel={spread}", faults=[Fault("backward", 2, 2, rank=1)])
    assert_same(records, reference)
    assert [[failure.step for failure in record.failures] for record in records] == [[2], [2]]


@pytest.mark.slow
@needs_reset
def test_shards_in_bf16(cell):
    """What one update does not train is sharded all the same, and trained by the other in the same numerics."""
    (reference,) = run(cell, 0, "precision=bf16")
    for record in run(cell, 2, "parallel=fsdp", "precision=bf16"):
        assert record.error is None
        assert error(record.weights, reference.weights) < 5e-2
