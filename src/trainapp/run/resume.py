"""The checkpoint that a run continues from: which one, and what of it counts."""

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import pydantic
from pydantic import TypeAdapter

from trainapp.checkpoint import checkpointer
from trainapp.checkpoint.directory import CheckpointDirectory, read_manifest, resolve
from trainapp.config.schema import INFERENCE, Config, Loader
from trainapp.errors import UserError
from trainapp.parallel.rank_zero import answered_by_rank_zero
from trainapp.parallel.ranks import Ranks, SingleRank
from trainapp.run import changed_data
from trainapp.train.run import Run

log = logging.getLogger(__name__)


def agreed_checkpoint(config: Config, ranks: Ranks, has_restarted: bool) -> Path | None:
    """Rank 0 looks for the checkpoint. Collective; raises UserError on all ranks."""
    return answered_by_rank_zero(ranks, lambda: _checkpoint_to_resume(config, has_restarted))


def _checkpoint_to_resume(config: Config, has_restarted: bool) -> Path | None:
    """The requested checkpoint, else the newest one in the run directory."""
    resume, load = config.checkpointing.resume, config.checkpointing.load
    own = CheckpointDirectory(Path(config.run_dir), 1, SingleRank())
    if has_restarted and own.newest_name():
        return own.newest()
    if config.mode == "train" and load == "weights":
        return own.newest()  # its own comes before the weights of another run to begin with
    if resume not in ("auto", "none"):
        path, run_dir = resolve(resume), Path(config.run_dir).resolve()
        if config.mode == "train" and own.newest_name() and not path.resolve().is_relative_to(run_dir):
            raise UserError(
                f"checkpointing.resume={resume} with hydra.run.dir={config.run_dir}: this directory has checkpoints of "
                "its own run, which that one would replace; choose another directory, or checkpointing.resume=auto to "
                "continue the run that is here"
            )
        return path
    return own.newest() if resume == "auto" else None


def as_saved(config: Config, path: Path) -> Config:
    """The configuration with the checkpoint's seed: another seed mid-epoch would repeat and omit samples.

    With another mode than train also its `ema`: a run with a weight average was evaluated on the average; and what the
    run is made of, where the command line chooses none of it.
    """
    if config.mode != "train":
        config = _with_parts_of(config, path)
    saved = read_manifest(path)["config"]["train"]
    if saved["seed"] != config.train.seed:
        log.warning("train.seed=%d: the resumed run has seed %d and keeps it", config.train.seed, saved["seed"])
    changes: dict[str, Any] = {"seed": saved["seed"]}
    if config.mode != "train":
        changes["ema"] = saved["ema"]
    return dataclasses.replace(config, train=dataclasses.replace(config.train, **changes))


# What a run is made of. Not `user_packages`: a checkpoint from elsewhere would otherwise decide which code is imported.
_MADE_OF = (
    "model",
    "data",
    "loader",
    "task",
    "task_arguments",
    "adapter",
    "optimizer",
    "updates",
    "precision",
    "eval",
    "metrics",
    "objective",
)


def _with_parts_of(config: Config, path: Path) -> Config:
    """The configuration with the parts of the checkpoint's own that the command line does not name.

    Raises UserError for parts that this version does not know.
    """
    saved = read_manifest(path)["config"]
    taken = {name: saved[name] for name in _missing(config) if name in saved}
    try:
        return TypeAdapter(Config).validate_python(dataclasses.asdict(config) | taken)
    except pydantic.ValidationError as error:
        raise UserError(
            f"checkpoint {path}: its configuration is not one of this version's ({error.errors()[0]['loc']}: "
            f"{error.errors()[0]['msg']}); name its model and data, as in model=... data=..."
        ) from None


def _missing(config: Config) -> list[str]:
    """What the command line leaves to the checkpoint, each section by itself: a run's model may predict on other data.
    How data is loaded is no choice of it. An experiment chooses everything.
    """
    loading = tuple(f"data.{field.name}." for field in dataclasses.fields(Loader))
    of_data = [f"{name}." for name in config.given if f"{name}.".startswith("data.")]
    chosen = {"data": not all(name.startswith(loading) for name in of_data), "loader": bool(of_data)}
    chosen["task_arguments"] = config.chooses("task")
    if config.chooses("experiment"):
        return []
    if config.mode in INFERENCE:
        chosen["metrics"] = True
        if config.mode == "generate" or config.predict.split in ("val", "train"):
            chosen["eval"] = True  # no other data is opened
    elif chosen["data"]:
        chosen["eval"] = True  # sets that go with the run's own data
    return [name for name in _MADE_OF if not chosen.get(name, config.chooses(name))]


def restore(run: Run, path: Path) -> dict[str, Any]:
    """Fill the run from the checkpoint at `path`. Returns the micro-batch sizes in it, the `budget` of memory that they
    were found in, and under `not_replayed` what keeps a schedule of sizes from replaying the run.

    Raises UserError when the checkpoint does not fit the model.
    """
    sizes = checkpointer.restore(run.state, path, run.ranks)
    if not run.config.oom.keep_global_batch and sizes["global"] < run.state.global_size:
        run.set_global_size(sizes["global"])
    sizes["not_replayed"] = [*sizes.get("not_replayed", ()), *_changed(run, path, sizes)]
    progress = run.state.progress
    run.checkpointer.saved_at = progress.step
    if progress.stopped is not None and _stops_otherwise(read_manifest(path)["config"], run.config.to_dict()):
        log.info("the run had ended (%s); with other settings of stopping and callbacks it continues", progress.stopped)
        progress.stopped = None
    changed_data.follow(run, path)
    left = run.batches.steps_left(progress.consumed)
    if left is not None and left <= 0:  # another batch size or drop_last may leave nothing
        progress.begin_next_epoch()
    if run.config.mode == "train":
        _require_steps_left(run, path)
        _forget_other_objective(run, path)
        run.measure_length()  # data or global batch may have changed, now or before this checkpoint
    verb = "resumed from" if run.config.mode == "train" else "loaded"
    log.info("%s %s: step %d, epoch %d, %d samples", verb, path, progress.step, progress.epoch, progress.samples)
    return sizes


def _stops_otherwise(saved: dict[str, Any], now: dict[str, Any]) -> bool:
    """Whether what may end a run before its length has other settings than in the checkpoint."""
    return any(saved.get(name) != json.loads(json.dumps(now[name])) for name in ("stopping", "callbacks"))


def _require_steps_left(run: Run, path: Path) -> None:
    """Raises UserError where the run is to end before the checkpoint, or in a new directory also right there: what it
    returned would be the result of another run. A finished run, started again, returns its own.
    """
    train, progress = run.config.train, run.state.progress
    run_dir = Path(run.config.run_dir)
    is_own = path.resolve().is_relative_to(run_dir.resolve())
    begun = run.batches.epochs(progress)
    for name, end, reached in (("steps", train.max_steps, progress.step), ("epochs", train.max_epochs, begun)):
        if end is None or reached < end or (is_own and reached == end):
            continue
        if is_own:
            advice = f"set a later end, or another directory than hydra.run.dir={run_dir}"
        else:
            advice = "set a later end to continue it, or checkpointing.load=weights to begin a run with its weights"
        trained = f"{path} has already trained {round(reached, 2):.10g} {name}"
        raise UserError(f"train.max_{name}={end}: {trained}, so that none is left; {advice}")


def _forget_other_objective(run: Run, path: Path) -> None:
    """The best value so far means nothing where the objective is another one. Raises UserError where, in the directory
    of the run, `auto` would be another data set's: settings alone do not tell whether the data has a split of its own.
    """
    saved, run_dir = read_manifest(path)["config"], Path(run.config.run_dir)
    is_other = saved.get("objective") != run.config.objective
    if not is_other and run.config.objective == "auto" and "" not in run.eval_sets:
        now = json.loads(json.dumps(run.config.to_dict(), default=str))
        old, new = (next(iter(of.get("eval", {}).items()), None) for of in (saved, now))
        is_other = old is not None and old != new
        if is_other and old and path.resolve().is_relative_to(run_dir.resolve()):
            if new is None:
                changed = "there is not any more"
            else:
                changed = "has other settings now" if new[0] == old[0] else f"was not eval.{new[0]}"
            raise UserError(
                f"objective=auto: the data has no validation split, so the objective of the run in {run_dir} is that "
                f"of eval.{old[0]}, the first of `eval`, which {changed}; leave it the first, as it was, or choose "
                "another directory"
            )
    if is_other:
        progress = run.state.progress
        progress.objective = progress.best = progress.best_step = None


def _changed(run: Run, path: Path, sizes: dict[str, Any]) -> list[str]:
    """What changes with this checkpoint and is not in the schedule of sizes. Evaluation and export replay nothing."""
    if run.config.mode != "train":
        return []
    step, ranks, world = run.state.progress.step, read_manifest(path)["ranks"], run.ranks.world
    changes = (
        ("ranks", ranks, world),
        ("batch.global_size", sizes["global"], run.state.global_size),
        ("training samples", run.state.data_samples, run.batches.samples),
        ("the training data's order", run.state.data_order, run.batches.source.order_name),
        *_settings_changed(read_manifest(path)["config"], run.config),
    )
    return [f"{name}: {now} after step {step}, {before} until then" for name, before, now in changes if now != before]


# What decides the bits of a step apart from the sizes; the length of the run decides its learning rates.
_WHOLE = ("data", "model", "optimizer", "updates", "task", "task_arguments", "precision", "schedule", "adapter")
_PARTS = {
    "train": ("grad_clip", "ema", "nonfinite", "compile", "deterministic", "device"),
    "memory": ("loss_chunk",),
    "parallel": ("strategy",),
}


def _settings_changed(saved: dict[str, Any], config: Config) -> list[tuple[str, Any, Any]]:
    """`(name, before, now)` of sections and settings. The values of whole sections are left out."""
    now = json.loads(json.dumps(dataclasses.asdict(config), default=str))
    before = {name: _completed(saved.get(name), getattr(config, name)) for name in _WHOLE}
    changed = [(name, "others", "its settings") for name in _WHOLE if before[name] != now[name]]
    parts = {section: [*names] for section, names in _PARTS.items()}
    if config.schedule.shape != "constant":
        parts["train"] += ["max_steps", "max_epochs"]
    for section, names in parts.items():
        before = saved.get(section, {})
        changed += [
            (f"{section}.{n}", before.get(n), now[section][n]) for n in names if before.get(n) != now[section][n]
        ]
    return changed


def _completed(saved: Any, section: Any) -> Any:
    """A saved section with the defaults of settings that did not exist when it was saved."""
    if saved is None and isinstance(section, list | dict):
        return type(section)()
    if isinstance(saved, list) and isinstance(section, list) and len(saved) == len(section):
        return [_completed(*pair) for pair in zip(saved, section, strict=True)]
    if not (isinstance(saved, dict) and dataclasses.is_dataclass(section)):
        return saved
    new = [field for field in dataclasses.fields(section) if field.name not in saved]
    defaults = {
        field.name: field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        for field in new
    }
    return {**saved, **{name: value for name, value in defaults.items() if value is not dataclasses.MISSING}}
