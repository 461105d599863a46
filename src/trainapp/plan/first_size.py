"""The first micro-batch size of a run in which every size that fails costs a restart of all workers.

`python -m trainapp.plan.first_size` is the process that traces: a task or a model may keep what it makes in a first
step, and here that would be tensors without data.
"""

import json
import logging
import os
import pickle
import subprocess
import sys

from trainapp.config.schema import Config
from trainapp.data.sampler import TrainBatches
from trainapp.models.inspect import blocks_of
from trainapp.plan.trace import traced_step
from trainapp.rng import seed_everything
from trainapp.train.components import choose_device, load_components
from trainapp.train.run import Run

PATIENCE = 120.0  # seconds for the trace of all sizes
log = logging.getLogger(__name__)


def begin_with_plan(run: Run) -> None:
    """Where every size that fails restarts all workers, and nothing else has decided the first: plan it. Collective."""
    config = run.config
    if config.mode != "train" or not config.oom.enabled or run.retries_in_place or run.sizes.origin != "share":
        return
    planned = planned_size(run, run.sizes.train.start)
    if planned is not None:
        run.sizes.begin_at(planned)


def planned_size(run: Run, share: int) -> int | None:
    """The largest of `share`, `share / 2`, ... whose step is expected to fit; 1 if none is. Collective.

    None where the model cannot be traced. An estimate: the activations of the whole model on one rank, beside what the
    fullest rank has in memory anyway. One that is too large costs a restart.
    """
    room = run.ranks.all_reduce_min(run.memory.enforced - run.meter.static_bytes - gathered_bytes(run))
    planned = traced_elsewhere(run.config, run.ranks.world, share, room) if run.ranks.is_rank_zero else None
    if planned is not None:
        log.info("micro-batch %d, as planned: here every size that fails restarts all workers", planned)
    return run.ranks.all_gather_object(planned)[0]


def traced_elsewhere(config: Config, world: int, share: int, room: int) -> int | None:
    """`largest_within` in a process of its own, which takes some seconds. None where it fails."""
    alone = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "trainapp.plan.first_size"],
            input=pickle.dumps((config, world, share, room)),
            env=alone | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            capture_output=True,
            timeout=PATIENCE,
        )
        return int(json.loads(ended.stdout.splitlines()[-1]))
    except (OSError, subprocess.SubprocessError, IndexError, ValueError, TypeError) as error:
        log.debug("the model could not be traced: %s", error)
        return None


def largest_within(config: Config, world: int, share: int, room: int) -> int:
    """The largest of `share`, `share / 2`, ... with which a step adds at most `room` bytes; 1 if none does.

    For one of `world` ranks. Uses the user's task and data; raises what they raise on tensors without data.
    """
    device = choose_device(config.train.device)
    seed_everything(config.train.seed)
    components = load_components(config)
    size, data, total = share, components.train_data, config.batch.global_size
    batches = TrainBatches(data, global_size=total, seed=config.train.seed, device=device, world=world)
    while size > 1:
        traced = traced_step(config, components.task, batches, device, size)
        if traced.memory.peak - traced.meter.static_bytes <= room:
            break
        size //= 2
    return size


def gathered_bytes(run: Run) -> int:
    """Bytes of whole parameters and gradients that a rank of FSDP holds beside its shards; 0 for other strategies."""
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


if __name__ == "__main__":
    print(json.dumps(largest_within(*pickle.load(sys.stdin.buffer))))
