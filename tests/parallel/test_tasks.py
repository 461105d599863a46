"""What a task may do with the model on several ranks: as on one device, or refused with one message."""

import pytest
import torch

from . import variants
from .cell import SPREADS, TINY
from .comparing import assert_same, error

pytestmark = pytest.mark.slow

NET = (
    "model=mlp",
    "model._target_=own_tasks.Net",
    "~model.depth",
    "model.width=16",
    "data=digits",
    "user_packages=[own_tasks]",
)


def alone(cell, task, *overrides):
    (reference,) = cell.reference(0, *NET, f"task=own_tasks.{task}", *overrides, tiny=TINY)
    return reference


def run(cell, world, task, *overrides, **options):
    return cell.run(world, *NET, f"task=own_tasks.{task}", *overrides, tiny=TINY, **options)


@pytest.mark.parametrize("task", ["reads_attributes", "calls_twice"])
@pytest.mark.parametrize("spread", SPREADS)
def test_methods_and_parameters_of_the_model(cell, spread, task):
    reference = alone(cell, task)
    assert_same(run(cell, 2, task, f"parallel={spread}"), reference)
    log_vars = reference.weights[:2]  # which only the task reads
    assert (log_vars != 0).all() == (task == "reads_attributes")


@pytest.mark.parametrize(
    "more",
    [
        (),
        ("parallel=hsdp",),
        ("parallel.fsdp.reshard_after_forward=false",),
        ("parallel.fsdp.sync_every_micro_batch=false",),
        ("parallel.fsdp.prefetch=2", "activation_checkpointing=full"),
    ],
    ids=" ".join,
)
def test_a_gradient_penalty_on_shards(cell, more):
    """Its second derivatives read the weights of blocks that the loss's backward has passed or not begun."""
    reference = alone(cell, "gradient_penalty")
    assert_same(run(cell, 2, "gradient_penalty", "parallel=fsdp", *more), reference)
    without = alone(cell, "calls_twice")
    assert error(without.weights, reference.weights) > 1e-2  # the comparison can fail


@pytest.mark.parametrize("task", ["penalty_first", "penalty_last"])
def test_a_penalty_of_weights_alone(cell, task):
    """A gradient that comes after the sum over the ranks is refused, not lost."""
    linear = "model._target_=own_tasks.Linear"
    reference = alone(cell, task, linear)
    records = run(cell, 2, task, linear, "parallel=fsdp")
    if task == "penalty_last":
        assert_same(records, reference)
    else:
        for record in records:
            assert "call the model for the inner gradients last" in record.error


@pytest.mark.parametrize("spread", ["fsdp", "hsdp"])
@pytest.mark.parametrize("by_backward", [False, True])
def test_attacks_in_evaluations(cell, spread, by_backward):
    task = (f"task.by_backward={by_backward}", "every.eval=2")
    (reference,) = cell.reference(0, *NET, "task._target_=own_tasks.Attacked", *task, tiny=TINY)
    records = cell.run(2, *NET, "task._target_=own_tasks.Attacked", *task, f"parallel={spread}", tiny=TINY)
    assert_same(records, reference)
    assert len(reference.evaluated) > 1
    for record in records:
        for evaluated, expected in zip(record.evaluated, reference.evaluated, strict=True):
            assert evaluated == pytest.approx(expected, rel=1e-5)


def test_a_task_outside_of_the_wrapper_fails_it(cell):
    """DDP then sums no gradients at all, which is refused before the update."""
    for record in run(cell, 2, "reads_attributes", "parallel=ddp", function=variants.train_outside_of_the_wrapper):
        assert "DDP waits for their gradients" in record.error


def test_all_parameters_read_by_a_task(cell):
    reference = alone(cell, "reads_a_blocks_weight")
    assert_same(run(cell, 2, "reads_a_blocks_weight", "parallel=ddp"), reference)
    for record in run(cell, 2, "reads_a_blocks_weight", "parallel=fsdp"):
        assert "reads a parameter of one of the blocks outside the block's forward" in record.error


@pytest.mark.parametrize(
    ("spread", "task", "message"),
    [  # while training, and before
        ("ddp", "with_parameters", "the loss depends on 1 parameters that are not among model.parameters()"),
        ("fsdp", "mean", "the loss is a mean, but a sum is required"),
        ("fsdp", "calls_backward", "use torch.autograd.grad for gradients inside a task"),
    ],
)
def test_what_is_refused(cell, spread, task, message):
    for record in run(cell, 2, task, f"parallel={spread}"):
        assert message in record.error


@pytest.mark.parametrize("spread", ["ddp", "fsdp"])
@pytest.mark.parametrize("model", ["Lazy", "Sparse"])
def test_models(cell, spread, model):
    if (spread, model) == ("fsdp", "Sparse"):
        pytest.skip("it has no blocks")
    chosen = (f"model._target_=own_tasks.{model}", "~model.width", "~model.dropout", "task=classification")
    records = cell.run(2, *NET[:3], *NET[4:], *chosen, f"parallel={spread}", tiny=TINY)
    assert all(record.error is None and len(record.losses) == 4 for record in records)
    assert records[0].weights.equal(records[1].weights)


def test_the_fused_kernel_only_where_the_shards_have_one(cell):
    """By default none is used for SGD on shards; asked for, it is refused."""
    sgd = ("optimizer=sgd", "parallel=fsdp")
    assert all(record.error is None for record in cell.run(2, *sgd))
    for record in cell.run(2, *sgd, "optimizer.fused=true"):
        assert (
            "optimizer._target_=torch.optim.SGD: it cannot take a plain step on this model's gradients" in record.error
        )


@pytest.mark.parametrize("spread", SPREADS)
def test_asking_a_task_for_its_metrics_leaves_no_trace(cell, spread):
    """Neither in the task, which writes in place, nor in the model, whose parameters are gathered for the call."""
    own = (f"parallel={spread}", "every.eval=2", "train.check_loss=false")
    plain = run(cell, 2, "CountsInPlace", *own, "objective=min loss")
    for record, other in zip(run(cell, 2, "CountsInPlace", *own, "objective=max accuracy"), plain, strict=True):
        assert record.error is None
        assert record.losses == other.losses
        assert torch.equal(record.weights, other.weights)


def test_all_ranks_refuse_a_loss_that_is_no_sum(cell):
    """Before anything is trained."""
    own = ("model._target_=own_tasks.Uniform", "~model.width", "~model.dropout", "parallel=fsdp")
    for record in run(cell, 2, "balanced", *own):
        assert record.error.startswith("task=own_tasks.balanced: the loss is not a sum over samples")


@pytest.mark.parametrize("spread", ["ddp", "fsdp"])
def test_batchnorm_that_waits_for_other_ranks_is_refused(cell, spread):
    own = ("model._target_=own_tasks.Synchronised", "~model.width", "~model.dropout", f"parallel={spread}")
    records = cell.run(2, *NET[:3], *NET[4:], *own, "task=classification", tiny=TINY)
    assert all("the model has nn.SyncBatchNorm (layers.2), which waits" in record.error for record in records)


DRAWS = ("model=mlp", "model._target_=own_draws.Transformer", "~model.width", "~model.depth", "~model.dropout")
DRAWS += ("data=digits", "user_packages=[own_draws]", "task=own_draws.task")


@pytest.mark.parametrize("spread", ["ddp", "fsdp"])
def test_draws_by_sample_do_not_depend_on_the_ranks(cell, spread):
    """On three uneven ones, with other micro-batches; torch's own draws are those of the rank."""
    for way, is_same in (("per_sample", True), ("device", False)):
        settings = (*DRAWS, f"train.draws={way}")
        (reference,) = cell.reference(0, *settings, "batch.micro_size=16", tiny=TINY)
        spread_out = cell.run(3, *settings, "batch.micro_size=4", f"parallel={spread}", tiny=TINY)
        if is_same:
            assert_same(spread_out, reference)
        else:
            assert error(spread_out[0].gradients[0], reference.gradients[0]) > 1e-2
