"""Overrides that the program offers: they must work as printed, appended to the user's command.

An override such as `optimizer=adamw_8bit` fails where the command line also sets `optimizer.momentum`, which that
option lacks, and has no effect where an experiment's file sets `optimizer._target_` itself. So it is composed first; if
the result is not what was planned, each value is set by its name. Imports no torch.
"""

import functools
import logging
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from trainapp.config.adamw import IN_FEWER_BITS, is_adamw
from trainapp.config.schema import Config
from trainapp.errors import UserError
from trainapp.paths import CONF

_ARGUMENTS, _TARGET = "optimizer.arguments", "optimizer.target"
LOCAL = CONF / "local"  # settings for this machine
log = logging.getLogger(__name__)


def startable(
    command: str, settings: Sequence[str], changes: Mapping[str, Any], is_same_training: bool = True
) -> list[str]:
    """The overrides in `settings`, or others with the same effect where those would not work behind `command`.

    command: `Config.command`; without its overrides in it, as for a configuration made in Python, `settings` are
    returned as they are. changes: dotted names of `Config` and the values that the settings stand for.
    is_same_training: whether learning rate and weight decay are to stay, which come with an optimizer's option.
    """
    given = list(settings)
    if not changes or _leaves_alone(command, {name.partition(".")[0] for name in changes}):
        return given
    own = _composed(command, ())
    if own is None:
        return given
    got = _composed(command, tuple(given))
    if got is None or not all(_has(got, own, name, value, given) for name, value in changes.items()):
        given = _by_name(own, changes, given)
        got = _composed(command, tuple(given))
    if got is None:  # then no wording of it would start
        return list(settings)
    return [*given, *_kept(own, got, changes, is_same_training)]


def size_overrides(config: Config, size: int) -> list[str]:
    """The overrides that set the micro-batch, whatever else would set it."""
    others = []
    if config.batch.micro_schedule is not None:
        others.append("batch.micro_schedule=null")
    if config.accumulation.steps != "auto":
        others.append("accumulation.steps=auto")
    return [*others, f"batch.micro_size={size}"]


def _leaves_alone(command: str, sections: Collection[str]) -> bool:
    """Whether the command sets nothing in these sections, not even through files: then the shipped options are as they
    are, and composing them again, which takes a tenth of a second each, would tell nothing.
    """
    named = {re.split(r"[.=@]", word.lstrip("+~"))[0] for word in shlex.split(command)[3:]}
    return not named & {*sections, "experiment", "debug", "local", "--config-dir"} and not LOCAL.exists()


@functools.lru_cache(maxsize=128)
def _composed(command: str, settings: tuple[str, ...]) -> Config | None:
    """The configuration of this command with more overrides; None where it cannot be composed."""
    from trainapp.config import compose  # late: Hydra is not imported in workers and the planner's process

    words = shlex.split(command)[3:]  # python -m trainapp
    folder = None
    if words[:1] == ["--config-dir"]:
        folder, words = words[1], words[2:]
    overrides = [word for word in words if not word.startswith("hydra.")]
    try:
        return compose.from_command_line([*overrides, *settings], config_dir=folder)
    except UserError as error:
        log.debug("%s with %s: %s", command, settings, error)
    except Exception:
        log.debug("%s with %s", command, settings, exc_info=True)
    return None


def _has(got: Config, own: Config, name: str, value: Any, settings: Sequence[str]) -> bool:
    """Whether the composed configuration has this value. Of an optimizer's arguments, those that the command line has
    set and the settings do not may differ; none may be too many.
    """
    found: Any = got
    for part in name.split("."):
        found = getattr(found, part)
    if name != _ARGUMENTS:
        return bool(found == value)
    required = {key: wanted for key, wanted in value.items() if not _stays(own, got.optimizer.target, key, settings)}
    return found.keys() <= value.keys() and all(found.get(key) == wanted for key, wanted in required.items())


def _stays(own: Config, target: str, key: str, settings: Sequence[str]) -> bool:
    """Whether this argument keeps the value of the command line: betas and eps are AdamW's in any precision."""
    is_alike = target == own.optimizer.target or (target == IN_FEWER_BITS and is_adamw(own.optimizer))
    return is_alike and key in own.optimizer.arguments and not any(s.startswith(f"optimizer.{key}=") for s in settings)


def _by_name(own: Config, changes: Mapping[str, Any], settings: Sequence[str]) -> list[str]:
    """The changes as overrides that need no option: `++` adds or replaces a value, `~` removes it."""
    overrides = []
    for name, value in changes.items():
        if name == _ARGUMENTS:
            target = changes.get(_TARGET, own.optimizer.target)
            kept = {key for key in value if _stays(own, target, key, settings)}
            overrides += [f"++optimizer.{key}={_written(wanted)}" for key, wanted in value.items() if key not in kept]
            overrides += [f"~optimizer.{key}" for key in own.optimizer.arguments if key not in value]
        else:
            overrides.append(f"++{'optimizer._target_' if name == _TARGET else name}={_written(value)}")
    return overrides


def _kept(own: Config, got: Config, changes: Mapping[str, Any], is_same_training: bool) -> list[str]:
    """What an optimizer's option brings along and is to stay: its rate and decay; `fused=true` is for another class."""
    if _TARGET not in changes:
        return []
    names = ("lr", "weight_decay") if is_same_training else ()
    kept = [name for name in names if getattr(own.optimizer, name) != getattr(got.optimizer, name)]
    overrides = [f"++optimizer.{name}={_written(getattr(own.optimizer, name))}" for name in kept]
    return overrides + ["++optimizer.fused=auto"] * (got.optimizer.fused is True)


def _written(value: Any) -> str:
    """The value in Hydra's grammar."""
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(_written, value))}]"
    return {"None": "null", "True": "true", "False": "false"}.get(str(value), str(value))
