"""Names of settings that do not exist: what an older version or another program calls a setting, and typing errors.

Imports no torch.
"""

import re
from collections.abc import Sequence

from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainapp.config.validation import suggest
from trainapp.files import CONF

# Settings and options (`group=option`) of earlier versions, and what became of them.
RENAMED = {
    "activation_checkpointing=budget": "is now activation_checkpointing=auto",
    "activation_checkpointing.bytes": "is gone: activation_checkpointing=auto keeps what fits memory.limit",
    "activation_checkpointing.every": "is gone; activation_checkpointing.modes has a mode per block",
    "oom.plan": "is gone: an out-of-memory error is answered with what the failed step measured",
    "oom.remember": "is gone: a run depends on its configuration and its checkpoint alone",
    "optimizer=adamw_fp8": "is gone; use optimizer=adamw_8bit",
    "plan.levers": "is now plan.techniques",
}

# The last part of a setting in other programs, and what is meant, most likely.
_ELSEWHERE = {
    "batch_size": "batch.global_size=N (of the step, over all ranks; micro-batches are found)",
    "compile": "train.compile",
    "criterion": "task",
    "dataset": "data",
    "device": "train.device",
    "epochs": "train.max_epochs",
    "grad_clip": "train.grad_clip",
    "gradient_accumulation_steps": "accumulation.steps",
    "gradient_checkpointing": "activation_checkpointing=full",
    "gradient_clip_val": "train.grad_clip",
    "learning_rate": "optimizer.lr",
    "logger": "tracker",
    "loss": "task",
    "loss_fn": "task",
    "lr": "optimizer.lr",
    "lr_scheduler": "schedule",
    "max_epochs": "train.max_epochs",
    "max_grad_norm": "train.grad_clip",
    "max_steps": "train.max_steps",
    "num_epochs": "train.max_epochs",
    "num_train_epochs": "train.max_epochs",
    "num_workers": "data.num_workers",
    "output_dir": "hydra.run.dir",
    "precision": "precision",
    "resume": "checkpointing.resume",
    "resume_from_checkpoint": "checkpointing.resume",
    "scheduler": "schedule",
    "seed": "train.seed",
    "weight_decay": "optimizer.weight_decay",
}
_MODES = ("train", "eval", "predict", "generate", "export", "plan", "lr_find")
_MODULES = {"optimizer": "torch.optim", "schedule": "torch.optim.lr_scheduler"}


def renamed(setting: str, value: object = None) -> str | None:
    """What became of a setting, or of its value, of an earlier version; None for all others."""
    for name in (setting, f"{setting}={value}", f"{setting.removesuffix('.mode')}={value}"):
        if name in RENAMED:
            return f"{name}: {RENAMED[name]}"
    return None


def explain(error: BaseException, overrides: Sequence[str]) -> str | None:
    """The message for a mistake on the command line that Hydra has found; None for an error that needs its traceback.
    Hydra's own words, but where a name is meant that can be said.
    """
    if isinstance(error, ValueError) and str(error).startswith("Config group override"):  # precision=16
        given = next((text for text in overrides if _is_option_without_name(text)), str(error))
        return f"{given}: an option is chosen by its name; `trainapp --help` lists them"
    if not isinstance(error, (HydraException, OmegaConfBaseException)):
        return None
    text = str(error).strip().partition("\nConfig search path:")[0].strip()
    if option := re.search(r"Could not find '([^']+)/([^'/]+)'", text):
        choices = re.findall(r"^\s+(\S+)$", text.partition("Available options")[2], re.MULTILINE)
        return _unknown_option(option[1], option[2], choices)
    if nameless := re.match(r"Error parsing override '([\w-]+)'\nmissing EQUAL", text):
        meant = f"mode={nameless[1]}" if nameless[1] in _MODES else "SETTING=VALUE, such as train.max_steps=100"
        return f"{nameless[1]}: an argument must be a setting with a value; use {meant} (`trainapp --help` lists them)"
    if override := re.search(r"Could not override '([^']+)'", text):
        return _unknown_setting(override[1], error, overrides)
    cause = str(error.__cause__ or "").strip()
    return text if cause in text else f"{text}\n{cause}"


def _is_option_without_name(text: str) -> bool:
    group, _, value = text.lstrip("+").partition("=")
    return (CONF / group).is_dir() and re.fullmatch(r"[-+\d.e]+|null|true|false", value) is not None


def _unknown_option(group: str, name: str, choices: Sequence[str]) -> str:
    if found := renamed(group, name):
        return found
    hint = suggest(name, choices) or suggest(name.lower(), choices)
    more = ""
    if group in _MODULES and name[:1].isupper():
        more = f"; a class of torch is named in full, as in {group}._target_={_MODULES[group]}.{name}"
    elif group == "experiment":
        more = "; those in a folder of yours need --config-dir FOLDER"
    return f"{group}={name}: no such option{hint}; available: {', '.join(choices) or 'none'}{more}"


def _unknown_setting(path: str, error: BaseException, overrides: Sequence[str]) -> str:
    """For an override of a key that no YAML file has. Where a class is chosen, it may be an argument of that."""
    if found := renamed(path):
        return found
    parent, _, key = path.rpartition(".")
    node = getattr(error.__cause__ or error, "parent_node", None)
    listed = [str(name) for name in node] if node is not None and OmegaConf.is_dict(node) else []
    close = suggest(key, [*listed, *(() if parent else (folder.name for folder in CONF.iterdir()))])
    meant = _ELSEWHERE.get(key)
    value = next((text.partition("=")[2] for text in overrides if text.startswith(f"{path}=")), "VALUE")
    if meant is not None and meant != path:
        hint = f"; here it is {meant}"
    elif close or not parent:
        hint = close
    elif "_target_" in listed or parent.partition(".")[0] in ("callbacks", "eval", "metrics", "tracker"):
        hint = f"; what the YAML files do not list, such as an argument of a class, is added with +{path}={value}"
    else:
        hint = f"; known in {parent}: {', '.join(listed)}"
    return f"{path}: no such setting{hint} (`trainapp --cfg job` shows all of them)"
