"""`checkpointing.load=weights`: a run that starts from the weights of another, and takes over nothing else."""

import logging
from pathlib import Path

from trainapp.checkpoint import checkpointer, shards
from trainapp.checkpoint.directory import read_manifest, resolve
from trainapp.config.schema import Config
from trainapp.errors import UserError
from trainapp.models import adapters
from trainapp.models.weights import load_tensors
from trainapp.parallel.rank_zero import answered_by_rank_zero
from trainapp.parallel.ranks import Ranks
from trainapp.train.run import Run

log = logging.getLogger(__name__)


def agreed_source(config: Config, ranks: Ranks) -> Path | None:
    """The checkpoint whose weights a run without one of its own begins with; None for `load=all`.

    Rank 0 looks for it. Collective; raises UserError on all ranks.
    """
    if config.mode != "train" or config.checkpointing.load == "all":
        return None
    return answered_by_rank_zero(ranks, lambda: _source(config))


def _source(config: Config) -> Path:
    resume = config.checkpointing.resume
    if resume == "auto":
        raise UserError(
            f"checkpointing.load=weights with checkpointing.resume=auto: {config.run_dir} has no checkpoint yet to "
            "continue from; name the run whose weights to begin with, as checkpointing.resume=RUN"
        )
    return resolve(resume)


def load(run: Run, path: Path) -> None:
    """Copy the weights in the checkpoint at `path` into the model, by the rules of `model.init_from`.

    They are those that `mode=export` would write: parameters, by their average if that run kept one, and buffers. Every
    rank reads them whole into host memory, and keeps its part. Of a run with adapters they are the adapters, and
    what forwards have written, for the same base. Raises UserError, before anything is copied, where they do not fit.
    """
    checkpointer.require_same_base(run.state.model, path)
    config, saved = run.config, shards.sizes(path)
    names = [name.removeprefix("model.") for name in saved if name.startswith("model.")]
    averaged = {name for name in names if f"average.{name}" in saved}
    read = shards.read_whole((_saved_name(name, name in averaged) for name in names), path)
    weights = {name: read[_saved_name(name, name in averaged)] for name in names}
    setting = f"checkpointing.resume={config.checkpointing.resume}"
    base = adapters.base_of(run.state.model)
    apart = frozenset() if base is None else base.names.difference(names)
    skipped = load_tensors(run.state.model, weights, config.model.init_strict, setting, apart)
    if skipped:
        log.warning("%s: not loaded, left as initialised: %s", setting, ", ".join(skipped))
    run.state.average.start_at_weights()
    log.info(
        "begins at step 0 with the %sweights of %s (step %d), and with nothing else of that run",
        "averaged " if averaged else "",
        path,
        read_manifest(path)["step"],
    )


def _saved_name(name: str, is_averaged: bool) -> str:
    return f"average.{name}" if is_averaged else f"model.{name}"
