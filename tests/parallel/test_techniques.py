"""Techniques on several ranks: the result is that of one process, and a failure on one rank costs one retried step."""

import itertools
import shutil
from importlib.util import find_spec

import pytest
import runs
import torch
from faults import Fault
from safetensors.torch import load_file

from trainapp.errors import UserError
from trainapp.techniques import catalogue

from . import variants
from .cell import GPT, SPREADS, TINY, Cell
from .comparing import TOLERANCE, as_one, assert_same, errors

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
}
# Techniques of the catalogue that are shown elsewhere, or on one rank only.
ELSEWHERE = {
    "precision=bf16": "test_equality.py",
    "precision=bf16_pure optimizer=adamw_bf16": "among the optimizers, below",
    "activation_checkpointing=auto": "a decision before the run: planning/test_decisions.py",
    "optimizer.in_backward=true": "refused on several ranks",
    "optimizer.in_backward=true train.grad_clip=null": "refused on several ranks",
    "train.ema=null": "the default",
    "adapter=lora": "needs an extra: models/test_adapters.py",
    "adapter.base_dtype=bf16": "needs an extra: models/test_adapters.py",
    "adapter.base_dtype=bf16 precision=bf16": "needs an extra: models/test_adapters.py",
    "parallel=fsdp": "each cell here",
    "parallel.fsdp.cpu_offload=true": "test_equality.py",
    "parallel.fsdp.meta_init=true": "test_tied_weights_stay_tied",
}
for one in catalogue.TECHNIQUES:
    if one.setting not in ELSEWHERE and not one.setting.startswith("optimizer="):
        TECHNIQUES[one.setting] = tuple(one.setting.split())
SLOW_STEPS = ("schedule=constant", "optimizer.lr=1e-3")
OPTIMIZERS = {name: (f"optimizer={name}", *SLOW_STEPS) for name in runs.options("optimizer")}
OPTIMIZERS["bf16 weights"] = ("optimizer=adamw_bf16", "precision=bf16_pure", *SLOW_STEPS)
if find_spec("torchao") is not None:
    OPTIMIZERS |= {kind: (f"precision={kind}", *SLOW_STEPS) for kind in ("int8", "fp8")}
REFUSED = set(itertools.product(("adafactor", "adamw_8bit", "adamw_4bit"), ("fsdp", "hsdp")))
QUICK = {
    ("ddp", "optimizer.offload=true"),
    ("fsdp", "chunks"),
    ("fsdp", "frozen from the start"),
    ("ddp", "groups"),
    ("fsdp", "groups"),
}
QUICK |= {("fsdp", "adamw_bf16"), ("fsdp", "adafactor"), ("ddp", "muon"), ("ddp", "bf16 weights")}
ON_DDP_ONLY = ("optimizer.offload=true", "memory.offload_activations=all")  # excludes.py refuses them with FSDP
CELLS = [
    pytest.param(spread, technique, marks=() if (spread, technique) in QUICK else pytest.mark.nightly)
    for spread in SPREADS
    for technique in TECHNIQUES
    if spread == "ddp" or technique not in ON_DDP_ONLY
]


def test_the_exceptions_are_in_the_catalogue():
    assert ELSEWHERE.keys() <= {one.setting for one in catalogue.TECHNIQUES}


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


OWN = ("user_packages=[own_models]", "train.max_steps=3")


@pytest.mark.slow
@pytest.mark.parametrize(("world", "rows"), [(2, 1), (3, 2)])
def test_muon_of_a_matrix_with_fewer_rows_than_ranks(cell: Cell, world, rows):
    """One rank has no part of it. Muon computes in bf16, which rounds otherwise on shards."""
    muon = ("model._target_=own_models.Gated", f"+model.rows={rows}", *OPTIMIZERS["muon"], *OWN)
    (reference,) = cell.reference(0, *muon)
    for record in cell.run(world, "parallel=fsdp", *muon):
        assert record.error is None
        assert record.losses == pytest.approx(reference.losses, rel=1e-4)
        assert errors(record, reference)[-1] < 2e-3
    for record in cell.run(world, "parallel=fsdp", *muon, function=variants.train_with_torchs_muon):  # negative control
        assert "in-place operations that require placement changes" in record.error


@pytest.mark.slow
def test_tied_weights_stay_tied(cell: Cell):
    """Tied on the meta device and not again; allocated, initialised, trained and saved as shards; then exported once,
    and continued by one process as by two.
    """
    settings = ("model._target_=own_models.TiedOnce", "checkpointing=standard", *OWN)
    sharded = ("parallel=fsdp", "parallel.fsdp.meta_init=true", *settings)
    run_dir, alone, out = cell.directory(), cell.directory(), cell.directory()
    cell.run(2, *sharded, "train.max_steps=1", run_dir=run_dir)
    shutil.copytree(run_dir, alone)
    (file,) = runs.run(out, *TINY, *GPT, *settings, "mode=export", f"checkpointing.resume={run_dir}")
    assert load_file(file).keys() & {"embedding.weight", "head.weight"} == {"embedding.weight"}
    (reference,) = cell.run(0, *settings, run_dir=alone)
    for record in cell.run(2, *sharded, run_dir=run_dir):
        assert len(record.losses) == 2
        assert record.losses == pytest.approx(reference.losses, rel=TOLERANCE)
        assert errors(record, reference)[-1] < TOLERANCE
    (whole,) = cell.reference(0, *settings)
    (apart,) = cell.reference(0, *settings, "model.tie_embeddings=false")  # negative control
    assert len(whole.weights) == len(reference.weights) < len(apart.weights)


def test_a_weight_in_two_units_is_refused(cell: Cell):
    for record in cell.run(2, "parallel=fsdp", "model._target_=own_models.HeadInBlock", *OWN):
        assert record.error is not None
        assert record.error.startswith("parallel=fsdp: embedding.weight and head.weight are one weight, in a block and")
