"""The model of a run, from one of its checkpoints: what `trainapp.load` returns."""

import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from torch import nn

from trainapp.checkpoint import checkpointer
from trainapp.checkpoint.directory import CheckpointDirectory, read_manifest, resolve
from trainapp.config.schema import Config
from trainapp.errors import UserError
from trainapp.parallel.ranks import SingleRank
from trainapp.signals import StopRequest
from trainapp.train import build

# Settings of a run that a model on the CPU does without; each starts from its default.
_LEFT_OUT = (
    "eval", "metrics", "callbacks", "tracker", "stopping", "batch", "every", "accumulation", "activation_checkpointing",
    "memory", "oom", "plan", "parallel", "export", "predict", "generate", "lr_find", "schedule",
    "checkpointing", "objective",
)  # fmt: skip


def model(run_dir: Path, which: str | Path, user_packages: Sequence[str]) -> nn.Module:
    """See `trainapp.load`. run_dir: absolute."""
    if not isinstance(which, str | Path) or not str(which):
        raise UserError(f"trainapp.load: which={which!r}: must be 'best', 'last' or the path of a checkpoint")
    path = _checkpoint(run_dir, which)
    config = settings_of(path, user_packages)
    with contextlib.closing(build.build(config, StopRequest(), SingleRank())) as run:
        checkpointer.restore(run.state, path, run.ranks)
        run.state.average.replace_weights()
        loaded = run.state.model
        return (loaded.float() if config.adapter.base_dtype == "bf16" else loaded).eval()  # its head is in fp32


def _checkpoint(run_dir: Path, which: str | Path) -> Path:
    """Raises UserError where there is none, or a damaged one."""
    try:
        if which == "last":
            return resolve(str(run_dir))
        if which != "best":
            return resolve(str(Path(which).expanduser()))
        best = CheckpointDirectory(run_dir, 1, SingleRank()).best()
        if best is None and run_dir.is_dir():
            raise UserError("it has no best checkpoint: the run saved none at an evaluation; use which='last'")
        return resolve(str(best or run_dir))
    except UserError as error:
        reason = str(error).removeprefix("checkpointing.resume=")
        raise UserError(f"trainapp.load: run_dir={run_dir}, which={str(which)!r}: {reason}") from None


def settings_of(path: Path, user_packages: Sequence[str]) -> Config:
    """The settings in a checkpoint, as far as they make the model, for the CPU.

    user_packages: the caller's. Those in the checkpoint are not trusted: with them, a planted name would run.
    """
    saved = {name: value for name, value in read_manifest(path)["config"].items() if name not in _LEFT_OUT}
    try:
        config: Config = TypeAdapter(Config).validate_python(saved)
    except ValidationError as error:
        first = error.errors()[0]
        setting = ".".join(map(str, first["loc"]))
        raise UserError(f"checkpoint {path}: its setting {setting} is none of this version's: {first['msg']}") from None
    mode = config.precision.mode
    changes: dict[str, Any] = {
        "mode": "export",
        "user_packages": list(user_packages),
        "given": [],
        "run_dir": "",
        "train": dataclasses.replace(
            config.train, device="cpu", compile=False, deterministic=False, detect_anomaly=False
        ),
        "loader": dataclasses.replace(config.loader, num_workers=0),
        # The weights come from the checkpoint; with adapters, it has those alone.
        "model": dataclasses.replace(config.model, init_from=None) if config.adapter.kind == "none" else config.model,
        # The others differ from fp32 in how they compute; this one in what the weights are.
        "precision": dataclasses.replace(config.precision, mode=mode if mode == "bf16_pure" else "fp32"),
        "optimizer": dataclasses.replace(config.optimizer, fused="auto", in_backward=False, offload=False),
    }
    return dataclasses.replace(config, **changes)
