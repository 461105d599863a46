"""Several optimizers on several ranks: as on one, also with an error on one rank in either update."""

import pytest
from faults import Fault

from .cell import TINY, needs_reset
from .comparing import assert_same, error

UPDATES = (
    "updates=[{name: discriminator, task: zoo.gans.discriminate, parameters: [discriminator], optimizer: {lr: 0.1}}, "
    "{name: generator, task: zoo.gans.generate, parameters: [generator], optimizer: {lr: 0.2}}]"
)
GAN = (
    *("user_packages=[zoo]", "model._target_=zoo.gans.SteadyGAN", "data._target_=zoo.data.Vectors"),
    *("task=zoo.gans.distance", UPDATES),
)


def run(cell, world, *overrides, **options):
    return cell.run(world, *GAN, *overrides, tiny=TINY, **options)


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
    """In the discriminator's first micro-batch, and in the generator's second."""
    (reference,) = run(cell, 0)
    fault = Fault("backward", 2, 2 if update == "discriminator" else 80, rank=1, update=update)
    records = run(cell, 2, f"parallel={spread}", faults=[fault])
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
