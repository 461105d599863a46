"""The first micro-batch size of a run in which every size that fails costs a restart of all workers."""

import logging

from trainapp.config.schema import Config
from trainapp.errors import UserError
from trainapp.models.inspect import blocks_of
from trainapp.planning import process
from trainapp.planning.step_peaks import of_one_rank
from trainapp.planning.traced_run import trace
from trainapp.train.components import load_components
from trainapp.train.run import Run
from trainapp.train.run_sizes import PlannedSizes

PATIENCE = 120.0  # seconds for the trace of all sizes
log = logging.getLogger(__name__)


def begin_with_plan(run: Run) -> None:
    """Where every size that fails restarts all workers, and nothing else has decided the first: plan it. Collective."""
    config = run.config
    if config.mode != "train" or not config.oom.enabled or run.retries_in_place or run.sizes.origin != "share":
        return
    planned = planned_size(run, run.sizes.train.start)
    if planned is not None:
        for name in reversed(run.sizes.by_update):
            run.sizes.turn_to(name)
            run.sizes.begin_with(PlannedSizes(planned, 2 * planned))


def planned_size(run: Run, share: int) -> int | None:
    """The largest of `share`, `share / 2`, ... whose step is expected to fit; 1 if none is. Collective.

    None where the model cannot be traced. An estimate: the activations of the whole model on one rank, on the CPU,
    in addition to what the fullest rank has in memory anyway. One that is too large costs a restart.
    """
    room = run.ranks.all_reduce_min(run.memory.enforced - run.meter.static_bytes - gathered_bytes(run))
    planned = _traced_elsewhere(run, share, room) if run.ranks.is_rank_zero else None
    if planned is not None:
        log.info("micro-batch %d, as planned: here every size that fails restarts all workers", planned)
    return run.ranks.all_gather_object(planned)[0]


def _traced_elsewhere(run: Run, share: int, room: int) -> int | None:
    """`largest_within` in a process of its own. None where it fails."""
    try:
        size: int = process.answer_of(
            f"{__name__}.largest_within", of_one_rank(run), share, room, patience=PATIENCE, sees_devices=False
        )
    except (process.NoAnswer, UserError) as error:
        log.debug("the model could not be traced: %s", error)
        return None
    return size


def largest_within(config: Config, share: int, room: int) -> int:
    """The largest of `share`, `share / 2`, ... with which a step adds at most `room` bytes; 1 if none does.

    Raises what the user's task and data raise on tensors without data. Sets torch's global switches: call it in a
    process of its own.
    """
    components = load_components(config)
    size = share
    while size > 1:
        traced = trace(config, components, size, 0)
        assert traced.training is not None, "traced without training"
        if traced.training.total - sum(traced.static.values()) <= room:
            break
        size //= 2
    return size


def gathered_bytes(run: Run) -> int:
    """Bytes of whole parameters and gradients that a rank of FSDP holds in addition to its shards, 0 for others."""
    config, model = run.config.parallel, run.state.model
    if config.strategy != "fsdp" or run.ranks.world == 1:
        return 0
    everything = sum(p.numel() for p in model.parameters())
    blocks = [sum(p.numel() for p in block.parameters()) for block in blocks_of(model, "parallel=fsdp")]
    largest, outside = max(blocks, default=0), everything - sum(blocks)
    parameters = outside + min(sum(blocks), (1 + config.fsdp.prefetch) * largest)
    if not config.fsdp.reshard_after_forward:
        parameters = everything
    gradients = largest if config.fsdp.sync_every_micro_batch else everything
    return parameters * run.state.precision.compute_dtype.itemsize + 4 * gradients
