"""One process == 2 == 4 for every strategy: losses, gradients, weights and samples of several steps.

Every sequence has a different number of tokens, so each rank and micro-batch has a different weight.
"""

import pytest
import torch
from faults import Fault

from . import variants
from .cell import RESETS, TINY
from .comparing import as_one, assert_same, error, errors, together


def nightly(*values):
    """Mark a case: all but one or two of several similar ones."""
    return pytest.param(*values, marks=pytest.mark.nightly)


MOST_SPREADS = ["ddp", "fsdp", nightly("hsdp")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spread", "world"),
    [
        ("ddp", 2),
        ("fsdp", 2),
        ("hsdp", 2),
        nightly("ddp", 3),
        nightly("fsdp", 1),
        nightly("fsdp", 3),
        nightly("hsdp", 4),
    ],
)
def test_as_one_process(cell, spread, world):
    as_one(cell, world, spread, "train.ema=0.5")


@pytest.mark.slow
@pytest.mark.parametrize("spread", MOST_SPREADS)
def test_averaging_would_be_noticed(cell, spread):
    # Negative control: gradients averaged over ranks, as DDP and FSDP do by default.
    (reference,) = cell.reference(0)
    for record in cell.run(2, f"parallel={spread}", function=variants.train_averaging):
        assert min(errors(record, reference)) > 0.01
        assert error(record.gradients[0], reference.gradients[0]) == pytest.approx(0.5, abs=1e-4)


MASKED = (
    "data._target_=parallel.saboteur.MaskedTokens",
    "user_packages=[parallel]",
    "batch.global_size=4",
    "train.max_steps=6",
)


@pytest.mark.slow
@pytest.mark.parametrize("spread", MOST_SPREADS)
def test_a_rank_without_a_valid_token(cell, spread):
    records = as_one(cell, 4, spread, *MASKED)
    samples = [sample for samples_of_step in together(records).values() for sample in samples_of_step]
    assert sum(sample % 3 == 0 for sample in samples) > 3


@pytest.mark.slow
@pytest.mark.parametrize("spread", MOST_SPREADS)
def test_clipping(cell, spread):
    # Once per step, by the norm over all ranks.
    (unclipped,) = cell.reference(0)
    records = as_one(cell, 4 if spread == "hsdp" else 2, spread, "train.grad_clip=0.05")
    assert errors(records[0], unclipped)[-1] > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("world", [nightly(1), 2])
@pytest.mark.parametrize("spread", ["ddp", "fsdp"])
def test_fp16_overflow_on_one_rank(cell, spread, world):
    fp16 = ("precision=fp16", "precision.initial_scale=256")
    # The gradient of the loss; FSDP2 gathers the root's parameters before it.
    first = 28 if (spread, world) == ("fsdp", 2) else 3
    fault = Fault("backward", 2, first, kind="inf", rank=world - 1)
    records = cell.run(world, f"parallel={spread}", *fp16, faults=[fault])
    (undisturbed,) = cell.reference(0, *fp16)
    for record in records:
        assert record.scales == [256.0, 128.0, 128.0, 128.0, 128.0]  # halved by the skipped step, on all ranks
        assert record.progress["skipped"] == 1
        assert record.progress["step"] == 4
        assert torch.equal(record.weights, records[0].weights)
        assert not record.gradients[1].isfinite().all()
        assert error(record.gradients[0], undisturbed.gradients[0]) < 5e-3
        # The step's samples are used up; its parameters are unchanged: the third attempt's gradient is finite.
        assert all(gradient.isfinite().all() for gradient in record.gradients[2:])


@pytest.mark.slow
@pytest.mark.parametrize("spread", ["ddp", "fsdp"])
@pytest.mark.parametrize(
    ("world", "global_size", "micro_size"),
    [(2, 7, 2), nightly(4, 7, 2), nightly(4, 3, 1), nightly(2, 1, 1), nightly(2, 9, 4), nightly(2, 13, 6)],
    ids=lambda value: str(value),
)
def test_a_global_batch_that_does_not_divide(cell, spread, world, global_size, micro_size):
    # 8 steps: long enough for the size to be validated, when voting ends on all ranks at the same step.
    sizes = (f"batch.global_size={global_size}", f"batch.micro_size={micro_size}", "train.max_steps=8")
    records = as_one(cell, world, spread, *sizes)
    assert [r.votes_enabled for r in records] == [records[0].votes_enabled] * world
    assert records[0].votes_enabled[0] == (RESETS or spread == "ddp")
    assert len({r.votes for r in records}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("spread", ["ddp", "fsdp"])
@pytest.mark.parametrize(("world", "samples"), [(2, 37), nightly(4, 37), (4, 3), nightly(4, 5)])
def test_evaluation_counts_every_sample_once(cell, spread, world, samples):
    overrides = ("every.eval=1", "batch.eval_micro_size=6", f"data.val_size={samples}", "train.max_steps=5")
    (reference,) = cell.reference(0, *overrides)
    records = cell.run(world, f"parallel={spread}", *overrides)
    assert_same(records, reference)
    for record in records:
        assert len(record.evaluated) == 5
        for metrics, expected in zip(record.evaluated, reference.evaluated, strict=True):
            assert metrics["loss"] == pytest.approx(expected["loss"], rel=1e-5)
            assert metrics["accuracy"] == pytest.approx(expected["accuracy"], abs=1e-9)


@pytest.mark.parametrize(
    ("spread", "overrides"),
    [
        nightly("ddp", ("batch.micro_size=1",)),
        ("ddp", ("accumulation.steps=3", "batch.micro_size=auto")),
        nightly("ddp", ("parallel.ddp.bucket_mb=0.001",)),
        ("ddp", ("parallel.ddp.static_graph=true",)),
        nightly("ddp", ("parallel.ddp.find_unused_parameters=true",)),
        nightly("fsdp", ("batch.micro_size=1",)),
        nightly("fsdp", ("accumulation.steps=3", "batch.micro_size=auto")),
        ("fsdp", ("parallel.fsdp.sync_every_micro_batch=false",)),
        ("fsdp", ("parallel.fsdp.reshard_after_forward=false",)),
        ("ddp", ("activation_checkpointing=selective",)),
        ("fsdp", ("activation_checkpointing=selective",)),
        nightly("fsdp", ("activation_checkpointing=full",)),
        nightly("fsdp", ("parallel.fsdp.prefetch=2",)),
        nightly("fsdp", ("parallel.fsdp.cpu_offload=true",)),
        nightly("hsdp", ("parallel.fsdp.sync_every_micro_batch=false", "batch.micro_size=1")),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else value,
)
def test_settings_that_change_no_result(cell, spread, overrides):
    shared = tuple(o for o in overrides if not o.startswith("parallel."))
    (reference,) = cell.reference(0, *shared)
    assert_same(cell.run(2, f"parallel={spread}", *overrides), reference)


@pytest.mark.slow
@pytest.mark.parametrize("spread", MOST_SPREADS)
def test_bf16(cell, spread):
    # bf16 has 8 bits: matmuls round differently in other micro-batches. Still, far from fp32's tolerance.
    (reference,) = cell.reference(0, "precision=bf16")
    for record in cell.run(2, f"parallel={spread}", "precision=bf16"):
        assert record.losses == pytest.approx(reference.losses, rel=2e-3)
        assert max(errors(record, reference)) < 2e-2


@pytest.mark.slow
@pytest.mark.parametrize("spread", ["ddp", "fsdp"])
def test_batchnorm_buffers_are_the_leaders(cell, spread):
    """Each rank trains with its own statistics; wherever they matter, rank 0's are used."""
    digits = ("model=resnet", "model.width=4", "data=digits", "every.eval=2")
    records = cell.run(2, f"parallel={spread}", *digits, tiny=TINY)
    assert records[0].evaluated == records[1].evaluated
    assert torch.equal(records[0].weights, records[1].weights)


@pytest.mark.slow
def test_training_does_not_compute_with_what_an_evaluation_has_gathered(cell):
    """Without resharding, the average of the weights would stay gathered after the evaluation."""
    kept = ("parallel=fsdp", "parallel.fsdp.reshard_after_forward=false", "train.ema=0.5")
    for plain, evaluated in zip(cell.run(2, *kept), cell.run(2, *kept, "every.eval=1"), strict=True):
        assert torch.equal(plain.weights, evaluated.weights)
