"""Turns what Hydra composed into the typed configuration and reports all mistakes at once. Imports no torch."""

import contextlib
import dataclasses
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pydantic
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.utils import JobRuntime
from hydra.version import VersionBase
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter

from trainapp.config import (
    command_line,
    data_of_run,
    hydra_errors,
    inference_settings,
    inline_targets,
    lr_settings,
    sections,
    updates,
)
from trainapp.config.micro_schedule import entries, is_by_update
from trainapp.config.schema import Config, Update
from trainapp.config.validation import messages
from trainapp.errors import UserError
from trainapp.paths import CONF

FILLED_IN = ("run_dir", "command", "loader", "given", "task_arguments")


def from_command_line(overrides: Iterable[str], run_dir: str = "", config_dir: str | Path | None = None) -> Config:
    """The configuration of `python -m trainapp OVERRIDES`, for notebooks, tests and benchmarks.

    config_dir: as `--config-dir`, a folder with options of your own. Raises UserError for every mistake.
    """
    given = inline_targets.expanded(data_of_run.expanded(as_overrides(overrides)))
    try:
        with _without_callers_hydra(), initialize_config_dir(str(CONF), version_base="1.3"):
            composed = compose("train", [*given, *_search_path(config_dir)])
    except Exception as error:
        message = hydra_errors.explain(error, given)
        if message is None:
            raise
        raise UserError(message) from None
    folder = [] if config_dir is None else [f"--config-dir {shlex.quote(str(Path(config_dir).expanduser().resolve()))}"]
    place = [command_line.directory(run_dir)] if run_dir else []
    command = " ".join(["python -m trainapp", *folder, *map(shlex.quote, given), *place])
    return from_hydra(composed, run_dir, command, given)


@contextlib.contextmanager
def _without_callers_hydra() -> Iterator[None]:
    """Inside `@hydra.main`, ours or the user's, Hydra refuses a second initialization: set its state aside."""
    main, runtime, version = GlobalHydra.instance(), JobRuntime.instance(), VersionBase.instance()
    hydra, name, base = main.hydra, runtime.get("name"), version.version_base
    main.clear()
    try:
        yield
    finally:
        main.hydra = hydra
        GlobalHydra.set_instance(main)
        runtime.set("name", name)
        version.version_base = base


def as_overrides(given: Iterable[str]) -> list[str]:
    """The overrides of a call from Python. Raises UserError for anything but a list of strings."""
    if isinstance(given, str):
        raise UserError(f"overrides={given!r}: must be a list of strings; use {given.split() or ['model=gpt']!r}")
    if isinstance(given, Mapping) or not isinstance(given, Iterable):
        raise UserError(f"overrides={given!r}: must be a list of strings, such as ['model=gpt', 'batch.micro_size=4']")
    overrides = list(given)
    for index, override in enumerate(overrides):
        if not isinstance(override, str):
            raise UserError(f"overrides[{index}]={override!r}: must be a string, such as 'model=gpt'")
    return overrides


def _search_path(config_dir: str | Path | None) -> list[str]:
    if config_dir is None:
        return []
    if not isinstance(config_dir, str | os.PathLike):
        raise UserError(f"config_dir={config_dir!r}: must be the path of the folder that holds your YAML files")
    folder = Path(config_dir).expanduser().resolve()
    if not folder.is_dir():
        raise UserError(f"config_dir={config_dir}: there is no such folder; name the one that holds your YAML files")
    return [f"hydra.searchpath=[{command_line.quoted(str(folder))}]"]


def from_hydra(composed: DictConfig, run_dir: str, command: str, overrides: Iterable[str] = ()) -> Config:
    """The typed configuration of one run. overrides: of the command line. Raises UserError with all mistakes, one per
    line.
    """
    try:
        plain = cast(dict[str, Any], OmegaConf.to_container(composed, resolve=True))
    except OmegaConfBaseException as error:
        setting = f"{error.full_key}: " if error.full_key else ""
        raise UserError(f"{setting}{str(error).strip().splitlines()[0]}") from None
    # Of `data@eval.hard=digits` the part that it sets.
    given = {re.split(r"[=:]", text.lstrip("+~"), maxsplit=1)[0].rpartition("@")[2] for text in overrides}
    return from_dict(plain, run_dir, command, sorted(given))


def from_dict(plain: dict[str, Any], run_dir: str = "", command: str = "", given: Sequence[str] = ()) -> Config:
    """As `from_hydra`, from plain containers in the layout of conf/train.yaml."""
    errors = _unknown_groups(plain)
    settings = {key: value for key, value in plain.items() if key not in ("data", "model", "optimizer", "eval")}
    settings |= sections.split(plain, errors)
    try:
        config = TypeAdapter(Config).validate_python(
            settings | {"run_dir": run_dir, "command": command, "given": [*given]}
        )
    except pydantic.ValidationError as error:
        errors += [_as_written(line) for line in messages(error, "", _known_keys)]
    if not errors:
        errors = _conflicts(config)
    if errors:
        raise UserError("\n".join(errors))
    return config


def _unknown_groups(plain: dict[str, Any]) -> list[str]:
    """Settings that the program fills in itself."""
    return [f"{key}: no such setting" for key in FILLED_IN if key in plain]


def _as_written(line: str) -> str:
    """The message, with settings named as the user writes them."""
    line = re.sub(
        r"^((?:updates\.\d+\.)?(?:data|model|optimizer|schedule|eval\.[^.]+))\.target\b", r"\1._target_", line
    )
    return re.sub(r"^loader\.", "data.", line)


def _known_keys(location: tuple[Any, ...]) -> list[str]:
    node: Any = Config
    for part in location:
        # `updates`, the only list of sections, has numbers in its locations
        kind = Update if isinstance(part, int) else next(f.type for f in dataclasses.fields(node) if f.name == part)
        node = kind
    return [f.name for f in dataclasses.fields(node) if f.name not in FILLED_IN]


def _conflicts(config: Config) -> list[str]:
    """Rules that span several settings."""
    errors = _conflicts_of_adapters(config)
    train, batch, steps = config.train, config.batch, config.accumulation.steps
    if config.mode == "train" and train.max_steps is None and train.max_epochs is None:
        errors.append("train.max_steps=null and train.max_epochs=null: the run would never end; set one of them")
    if isinstance(batch.micro_size, int) and batch.micro_size > batch.global_size:
        errors.append(
            f"batch.micro_size={batch.micro_size}: must be at most batch.global_size={batch.global_size}; "
            "use batch.micro_size=auto"
        )
    for step, sizes in entries(batch.micro_schedule or {}):
        largest = max(sizes.values()) if isinstance(sizes, dict) else sizes
        if largest > batch.global_size:
            errors.append(
                f"batch.micro_schedule: {largest} from step {step} must be at most "
                f"batch.global_size={batch.global_size}"
            )
    if steps != "auto" and steps > batch.global_size:
        errors.append(
            f"accumulation.steps={steps}: must be at most batch.global_size={batch.global_size}; "
            "a micro-batch has at least one sample"
        )
    if steps != "auto" and batch.micro_size != "auto":
        errors.append(
            f"accumulation.steps={steps} and batch.micro_size={batch.micro_size}: both fix the micro-batch; "
            "set one of them to auto"
        )
    holds_no_votes = config.parallel.vote_on_oom == "never" and config.parallel.strategy != "single"
    if holds_no_votes and config.mode == "train" and config.oom.enabled and batch.micro_size == steps == "auto":
        errors.append(
            "parallel.vote_on_oom=never with batch.micro_size=auto: each size that fails would restart all workers; "
            "set batch.micro_size=N, or parallel.vote_on_oom=unproven"
        )
    if train.detect_anomaly and config.precision.mode == "fp16" and config.precision.initial_scale > 1:
        errors.append(
            "train.detect_anomaly=true with precision=fp16: its loss scale lets gradients overflow until it has "
            "settled, and the detection would stop at the first one; use precision=bf16, or precision.initial_scale=1"
        )
    if config.stopping.patience is not None and config.mode == "train" and config.every.eval is None:
        errors.append(
            f"stopping.patience={config.stopping.patience} with every.eval=null: it counts evaluations, and there are "
            "none; set every.eval, or stopping.patience=null"
        )
    if config.updates:
        errors += updates.conflicts(config)
    elif batch.micro_schedule and is_by_update(batch.micro_schedule):
        errors.append(
            f"batch.micro_schedule: sizes for {', '.join(batch.micro_schedule)}, but there are no updates of these "
            "names; write {1: 64, 30: 32}"
        )
    if config.mode == "train" and config.checkpointing.load == "weights" and config.checkpointing.resume == "none":
        errors.append(
            "checkpointing.load=weights with checkpointing.resume=none: name the run whose weights to begin with, "
            "as checkpointing.resume=RUN"
        )
    of_checkpoint = config.mode in ("eval", "export", *inference_settings.INFERENCE)
    if of_checkpoint and config.checkpointing.resume in ("auto", "none"):
        errors.append(
            f"mode={config.mode} with checkpointing.resume={config.checkpointing.resume}: name the checkpoint or the "
            "run directory that it is about"
        )
    return errors + inference_settings.conflicts(config) + lr_settings.conflicts(config)


def _conflicts_of_adapters(config: Config) -> list[str]:
    errors = []
    if config.export.merge and config.adapter.kind == "none" and config.chooses("adapter"):
        errors.append("export.merge=true with adapter=none: there is nothing to merge; leave it out")
    if config.export.merge_dtype != "fp32" and not config.export.merge:
        errors.append("export.merge_dtype=bf16: is the format of merged weights; also set export.merge=true")
    if config.adapter.base_dtype == "bf16" and config.precision.mode in ("fp32", "tf32", "fp16"):
        errors.append(
            f"adapter.base_dtype=bf16 with precision={config.precision.mode}: products with a base in bf16 are in "
            "bf16; use precision=bf16"
        )
    if config.adapter.kind != "none" and config.parallel.fsdp.meta_init:
        errors.append(
            f"adapter={config.adapter.kind} with parallel.fsdp.meta_init=true: the frozen weights would be drawn shard "
            "by shard, and no checkpoint has them; use parallel.fsdp.meta_init=false"
        )
    return errors
