"""The peak of a training step in variants of a run: for the advice, which compares them."""

import dataclasses
import logging
import time
from collections.abc import Sequence

from trainapp.assembly.components import load_components
from trainapp.config.schema import Config
from trainapp.errors import UserError
from trainapp.planning import process
from trainapp.planning.traced_run import trace
from trainapp.train.run import Run

PATIENCE = 60.0  # seconds after which no further variant is traced
log = logging.getLogger(__name__)


def of_one_rank(run: Run) -> Config:
    """The configuration for a trace of one rank's share of the batch, with the whole model, on the CPU."""
    config = run.config
    share = -(-run.state.global_size // run.ranks.world)  # with oom.keep_global_batch=false not the configuration's
    return dataclasses.replace(
        config,
        batch=dataclasses.replace(config.batch, global_size=share),
        parallel=dataclasses.replace(config.parallel, nodes=1),
        train=dataclasses.replace(config.train, device="cpu"),
    )


def step_peaks(variants: Sequence[Config], size: int) -> list[int | None]:
    """Peak bytes of a training step of each configuration with micro-batches of `size`, traced in a process of its own.

    None for one that cannot be traced, or for which no time is left. All have the data and the task of the first.
    """
    try:
        peaks: list[int | None] = process.answer_of(
            f"{__name__}.traced", variants, size, PATIENCE, patience=2 * PATIENCE, sees_devices=False
        )
    except (process.NoAnswer, UserError) as error:
        log.debug("the step could not be traced: %s", error)
        return [None for _ in variants]
    return peaks


def traced(variants: Sequence[Config], size: int, seconds: float) -> list[int | None]:
    """`step_peaks`, in this process, whose global switches it sets. seconds: begin no trace after so many."""
    end = time.monotonic() + seconds
    components = load_components(variants[0])
    peaks: list[int | None] = []
    for config in variants:
        if time.monotonic() > end or peaks[:1] == [None]:  # nothing to compare with
            peaks.append(None)
            continue
        try:
            found = trace(config, components, size, 0).training
            peaks.append(None if found is None else found.total)
        except Exception as error:
            log.debug("the step could not be traced: %s", error)
            peaks.append(None)
    return peaks
