"""Which settings make an experiment what it is, and in which of them two configurations differ. Imports no torch."""

import contextlib
import dataclasses
import json
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

from trainapp import strict_json
from trainapp.config import durations
from trainapp.config.schema import Config, Update

# A different value makes a different experiment. So does any constructor argument; those are not listed.
RESULT = {
    # With another objective, the best of before would be compared with other numbers.
    "": ("task", "updates", "objective"),
    "data": ("_target_", "drop_last"),
    "data.sampling": ("weights",),
    "model": ("_target_", "init_from", "init_strict", "freeze"),
    "optimizer": ("_target_", "lr", "weight_decay", "groups", "layer_decay"),
    "train": ("seed", "grad_clip", "ema"),
    "batch": ("global_size",),
    "precision": ("mode", "initial_scale", "growth_interval"),
    "schedule": ("_target_", "shape", "warmup", "decay", "final"),
    "checkpointing": ("load",),
    "adapter": ("kind", "rank", "alpha", "dropout", "targets", "train", "base_dtype"),
}
# May change in the course of an experiment: its end (a schedule is then measured again), cadences, limits, where and
# how it is computed (mostly, at most the rounding differs), what it writes, and what is done about an error that has
# ended it.
FREE = {
    "": ("mode", "user_packages", "eval", "metrics", "callbacks", "tracker"),  # but see `_of_objective`
    "data": ("num_workers", "on_change"),
    "optimizer": ("fused", "in_backward", "offload"),
    "train": (
        "max_steps",
        "max_epochs",
        "device",
        "compile",
        "deterministic",
        "nonfinite",
        "detect_anomaly",
        "check_loss",
        "check_exactness",
        "peak_flops",
    ),
    "batch": ("micro_size", "eval_micro_size", "micro_schedule"),
    "every": ("log", "eval", "save"),
    "stopping": ("patience", "min_delta", "metric"),
    "accumulation": ("steps",),
    "activation_checkpointing": ("mode", "every", "modes", "compiled_budget"),
    "memory": (
        "limit",
        "loss_chunk",
        "offload_activations",
        "expandable_segments",
        "timeline",
        "guard",
        "guard_reserve",
    ),
    "plan": ("device", "world", "levers"),
    "oom": ("enabled", "keep_global_batch", "clean_steps", "grow"),
    "parallel": ("strategy", "devices", "nodes", "endpoint", "run_id", "max_restarts", "timeout", "vote_on_oom"),
    "parallel.ddp": ("bucket_mb", "static_graph", "find_unused_parameters"),
    "parallel.fsdp": (
        "reshard_after_forward",
        "cpu_offload",
        "prefetch",
        "replicas",
        "sync_every_micro_batch",
        "meta_init",
    ),
    "checkpointing": ("resume", "save", "keep_last", "asynchronous"),  # but see `_sources`
    "predict": ("output", "split", "batch_size"),
    "generate": (
        "prompts",
        "output",
        "max_new_tokens",
        "temperature",
        "top_k",
        "top_p",
        "seed",
        "end_of_text",
        "batch_size",
    ),
    "export": ("folder", "file_size", "merge", "merge_dtype"),
    "lr_find": ("min", "max", "steps", "diverges"),
}
# Arguments that a recovery may change, and one that matters only where the run would have ended.
_IMPLEMENTATION = ("optimizer.foreach", "optimizer.capturable", "data.on_error")
_DURATIONS = ("schedule.warmup", "schedule.decay")
_OF_UPDATE = re.compile(r"updates\.\w+\.")  # of each of `updates`, by its name: `updates.generator.optimizer.lr`
NOT_SETTINGS = ("run_dir", "command", "given")  # what the program fills in
_AS_WRITTEN = {"loader": "data", "target": "_target_"}
ABSENT = object()  # the value of an argument that a configuration does not name

# (section, target, argument) -> the constructor's default, or ABSENT
Defaults = Callable[[str, str, str], Any]


def names(table: dict[str, tuple[str, ...]]) -> set[str]:
    """The settings in one of the tables, as users write them."""
    return {f"{section}.{name}" if section else name for section, own in table.items() for name in own}


_FREE = names(FREE)


def settings(config: dict[str, Any]) -> dict[str, Any]:
    """Every setting by its name, arguments of constructors included, from `Config.to_dict` or the JSON of one.

    What an older version did not have yet has its default.
    """
    return dict(_settings(Config, json.loads(strict_json.dumps(config, default=str)), ""))


def _settings(kind: Any, values: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(kind):
        if field.name in NOT_SETTINGS and not prefix:
            continue
        name = prefix + _AS_WRITTEN.get(field.name, field.name)
        value = values.get(field.name, _default(field))
        if dataclasses.is_dataclass(field.type):
            yield from _settings(field.type, value or {}, f"{name}.")
        elif field.name == "updates":
            yield name, [own["name"] for own in value]
            for own in value:
                yield from _settings(Update, own, f"updates.{own['name']}.")
        elif field.name in ("arguments", "task_arguments"):
            section = prefix if field.name == "arguments" else f"{prefix}task."
            yield from ((section + argument, given) for argument, given in (value or {}).items())
        else:
            yield name, value


def _default(field: Any) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        made = field.default_factory()
        return dataclasses.asdict(made) if dataclasses.is_dataclass(made) else made  # type: ignore[arg-type]
    return None if field.default is dataclasses.MISSING else field.default


def differences(
    before: dict[str, Any], now: dict[str, Any], default: Defaults | None = None
) -> list[tuple[str, Any, Any]]:
    """`(setting, before, now)` where two configurations, as `Config.to_dict`, are different experiments.

    Values that differ only in spelling are equal. default: for arguments that only one of the two names; None passes
    over these. Where the constructors differ, their arguments are left out.
    """
    old, new = settings(before), settings(now)
    every = sorted(old.keys() | new.keys())
    # `task` is the name itself; other sections have a `_target_`
    replaced = {_split(name)[0] for name in every if _split(name)[1] in ("", "_target_") and _differ(name, old, new)}
    found = []
    for name in every:
        section, argument = _split(name)
        common = _OF_UPDATE.sub("", name)
        if common in _FREE or common in _IMPLEMENTATION or (section in replaced and argument not in ("", "_target_")):
            continue
        a, b = old.get(name, ABSENT), new.get(name, ABSENT)
        if ABSENT in (a, b):
            if default is None:
                continue
            at_default = default(section, str(new.get(f"{section}._target_", new.get(section))), argument)
            a, b = (at_default if value is ABSENT else value for value in (a, b))
        if not _same(name, a, b):
            found.append((name, a, b))
    return found + _sources(old, new) + _of_objective(old, new)


def _split(name: str) -> tuple[str, str]:
    """Section and argument."""
    update = _OF_UPDATE.match(name)
    prefix = update[0] if update else ""
    section, _, argument = name.removeprefix(prefix).partition(".")
    return prefix + section, argument


def _differ(name: str, old: dict[str, Any], new: dict[str, Any]) -> bool:
    return bool(old.get(name) != new.get(name))


def _sources(old: dict[str, Any], new: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """Another run's weights to begin with. `auto` continues with those that it began with."""
    name = "checkpointing.resume"
    if "all" in (old["checkpointing.load"], new["checkpointing.load"]):
        return []
    a, b = (None if of[name] in ("auto", "none") else os.path.realpath(of[name]) for of in (old, new))
    return [(name, old[name], new[name])] if a and b and a != b else []


def _of_objective(old: dict[str, Any], new: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """Another metric or validation set under the name that the objective has: the best of before would be compared with
    other numbers.
    """
    names = new["objective"].partition(" ")[2].split("/")[:2]
    found = []
    for section, name in [("eval", names[0]), *(("metrics", name) for name in names)]:
        a, b = (of[section].get(name, ABSENT) for of in (old, new))
        found += [(f"{section}.{name}", a, b)] if a != b else []
    return found


def _same(name: str, a: Any, b: Any) -> bool:
    if a == b:
        return True
    if name in _DURATIONS:
        with contextlib.suppress(ValueError):
            return _duration(a) == _duration(b)
    if isinstance(a, str) and isinstance(b, str):
        with contextlib.suppress(OSError, ValueError):
            return os.path.samefile(a, b)
        return False
    with contextlib.suppress(TypeError, ValueError):
        return ABSENT not in (a, b) and not isinstance(a, bool) and not isinstance(b, bool) and float(a) == float(b)
    return False


def _duration(value: int | str) -> tuple[float, str]:
    amount, unit = durations.parse(value)
    return (amount, unit) if amount else (0.0, "")


def text_of(value: Any) -> str:
    """The value as a user writes it."""
    if value is ABSENT:
        return "not set"
    return value if isinstance(value, str) else json.dumps(value, default=str)
