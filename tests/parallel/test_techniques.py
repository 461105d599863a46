"""Techniques on several ranks: the result is that of one process, and a failure on one rank costs one retried step."""

import itertools
from importlib.util import find_spec

import pytest
import torch
from faults import Fault

from trainapp.errors import UserError

from .conftest import Cell
from .test_equality import SPREADS, as_one, assert_same, errors

TECHNIQUES = {
    "chunks": ("memory.loss_chunk=5",),
    "chunks, untied": ("memory.loss_chunk=5", "model.tie_embeddings=false"),
    "frozen": ("model.freeze=[layers.0]", "model.tie_embeddings=false"),
    "frozen from the start": ("model.freeze=[embedding,layers.0]", "model.tie_embeddings=false"),
    "groups": (
        "optimizer.groups=[{match: norm, lr: 0.5}]",
        "model.freeze=[layers.0.attention]",
        "optimizer.layer_decay=0.5",
    ),
    "on the host": ("optimizer.offload=true",),
}
SLOW_STEPS = ("schedule=constant", "optimizer.lr=1e-3")
OPTIMIZERS = {
    "bf16 states": ("optimizer=adamw_bf16", *SLOW_STEPS),
    "bf16 weights": ("optimizer=adamw_bf16", "precision=bf16_pure", *SLOW_STEPS),
    "adafactor": ("optimizer=adafactor", *SLOW_STEPS),
    "muon": ("optimizer=muon", *SLOW_STEPS),
}
if find_spec("torchao") is not None:
    OPTIMIZERS |= {kind: (f"precision={kind}", *SLOW_STEPS) for kind in ("int8", "fp8")}
REFUSED = {("adafactor", "fsdp"), ("adafactor", "hsdp")}
QUICK = {
    ("ddp", "on the host"),
    ("fsdp", "chunks"),
    ("fsdp", "frozen from the start"),
    ("ddp", "groups"),
    ("fsdp", "groups"),
}
QUICK |= {("fsdp", "bf16 states"), ("fsdp", "adafactor"), ("ddp", "muon"), ("ddp", "bf16 weights")}
CELLS = [
    pytest.param(spread, technique, marks=() if (spread, technique) in QUICK else pytest.mark.nightly)
    for spread in SPREADS
    for technique in TECHNIQUES
    if spread == "ddp" or technique != "on the host"
]


@pytest.mark.slow
@pytest.mark.parametrize(("spread", "technique"), CELLS)
def test_as_one_process(cell: Cell, spread, technique):
    records = as_one(cell, 2, spread, *TECHNIQUES[technique])
    if technique == "chunks":  # and as all logits at once
        (plain,) = cell.reference(0)
        assert_same(records, plain)
        (control,) = cell.reference(0, "train.seed=1")
        assert errors(control, plain)[-1] > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(("spread", "technique"), CELLS)
def test_a_failure_on_one_rank(cell: Cell, spread, technique):
    overrides = (f"parallel={spread}", *TECHNIQUES[technique], "model.dropout=0.1", "parallel.vote_on_oom=always")
    wanted = cell.run(2, *overrides, schedule={3: 2})
    records = cell.run(2, *overrides, faults=[Fault("backward", 3, 60, rank=1)])
    for record, other in zip(records, wanted, strict=True):
        assert len(record.failures) == 1
        assert torch.equal(record.weights, other.weights)
        assert record.losses == other.losses
    if technique == "chunks":  # negative control: the schedule one step late
        late = cell.run(2, *overrides, schedule={4: 2})
        assert not torch.equal(records[0].weights, late[0].weights)


def test_a_head_inside_a_block_is_refused(cell: Cell):
    overrides = ("model._target_=own_models.HeadInBlock", "user_packages=[own_models]", "memory.loss_chunk=5")
    for record in cell.run(2, "parallel=fsdp", *overrides):
        assert record.error is not None
        assert record.error.startswith("memory.loss_chunk=5: with parallel=fsdp the head of HeadInBlock must not be")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spread", "optimizer"),
    [
        pytest.param(*pair, marks=() if pair in QUICK else pytest.mark.nightly)
        for pair in itertools.product(SPREADS, OPTIMIZERS)
    ],
)
def test_optimizers(cell: Cell, spread, optimizer):
    """The same weights on all ranks, and nearly those of one process: what is rounded by chance is rounded alike."""
    (reference,) = cell.reference(0, *OPTIMIZERS[optimizer])
    if (optimizer, spread) in REFUSED:
        with pytest.raises(UserError, match=r"with parallel=fsdp: (the|its) state"):
            cell.run(2, f"parallel={spread}", *OPTIMIZERS[optimizer])
        return
    records = cell.run(2, f"parallel={spread}", *OPTIMIZERS[optimizer])
    for record in records:
        assert record.error is None
        assert torch.equal(record.weights, records[0].weights)
        assert record.losses == pytest.approx(reference.losses, rel=5e-3)
        assert errors(record, reference)[-1] < 1e-2
