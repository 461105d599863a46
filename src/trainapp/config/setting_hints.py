"""What other programs call a setting: hints in messages. Imports no torch."""

import re
from collections.abc import Collection, Sequence

# The last part of a setting that does not exist -> what is meant, most likely
_NAMES = {
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
_MODULES = {"optimizer": "torch.optim", "schedule": "torch.optim.lr_scheduler"}
_OPEN = ("callbacks", "eval", "metrics", "tracker")  # groups with entries of the user's own
_MODES = ("train", "eval", "predict", "generate", "export", "plan", "lr_find")


def of_setting(path: str) -> str | None:
    """What a setting that does not exist stands for, as the end of a message; None where nothing is known."""
    meant = _NAMES.get(path.rpartition(".")[2])
    if meant is None or meant == path:
        return None
    return f"; here it is {meant}"


def of_entry(path: str, value: str, options: Collection[str]) -> str | None:
    """How an entry of a group that has entries of the user's own is set, as the end of a message; None elsewhere.

    value: what it was to be set to; options: those of the group, each of which has the entry of its name.
    """
    group, _, rest = path.partition(".")
    name, _, key = rest.partition(".")
    if group not in _OPEN or not key:
        return None
    if name in options:
        return f"; it is a setting of {group}={name}, which is not chosen: several are {group}=[{name},...]"
    return f"; a new entry is added with +{path}={value}"


def of_option(group: str, name: str, arguments: Sequence[str]) -> str:
    """What is to be done about an option that does not exist, as the end of a message; maybe empty."""
    if group in _MODULES and re.fullmatch(r"[A-Z]\w+", name):
        return f"; a class of torch is named in full, as in {group}._target_={_MODULES[group]}.{name}"
    has_own = any(text.startswith(("--config-dir", "-cd")) for text in arguments)
    return "" if has_own or group != "experiment" else "; those in a folder of yours need --config-dir FOLDER"


def of_argument(text: str) -> str:
    """The message about an argument without `=`."""
    meant = f"mode={text}" if text in _MODES else "SETTING=VALUE, such as train.max_steps=100"
    return f"{text}: an argument must be a setting with a value; use {meant} (`trainapp --help` lists them)"
