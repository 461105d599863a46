"""Runs in this process, composed from the same YAML files as the command line's."""

import copy
import dataclasses
import functools
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import helpers
import pytest
import torch
from torch import nn

from trainapp.config import compose
from trainapp.config.schema import Config
from trainapp.errors import UserError
from trainapp.files import CONF, json_object
from trainapp.parallel.ranks import SingleRank
from trainapp.planning import planner
from trainapp.report.run_files import state_of
from trainapp.run import runner, trained
from trainapp.run.prepare import SessionStart
from trainapp.run.prepare import prepare as prepare_session
from trainapp.signals import StopRequest
from trainapp.training import loop, memory_watch
from trainapp.training.engine import Totals
from trainapp.training.session import Session

# A tiny run on the CPU: the defaults for every test.
TINY = (
    "train.device=cpu",
    "train.max_epochs=null",
    "train.max_steps=4",
    "batch.global_size=16",
    "every.log=1",
    "every.eval=null",
    "every.save=null",
    "memory.guard=false",
)
# Only its training steps and their sizes; nothing is saved or remembered.
STEPS_ONLY = (*TINY, "checkpointing=off", "oom.grow=false")
MODELS = {
    "mlp": ("model=mlp", "model.width=16", "data=digits"),
    "resnet": ("model=resnet", "model.width=4", "data=digits", "data.augment=true"),
    "gpt": (
        "model=gpt",
        "model.depth=1",
        "model.width=16",
        "model.heads=2",
        "model.context_length=16",
        "model.dropout=0.1",
        "data=synthetic_tokens",
        "data.vocab_size=32",
        "data.size=200",
        "data.val_size=40",
    ),
}


def options(group: str) -> tuple[str, ...]:
    """The names of a group's options, from `conf/`: lists of all of them in tests are made of it."""
    return tuple(sorted(path.stem for path in (CONF / group).glob("*.yaml")))


def own_model(name: str) -> tuple[str, ...]:
    """A model of a test's own, without the MLP's arguments."""
    return ("model=mlp", f"model._target_={name}", "~model.width", "~model.depth", "~model.dropout")


def infer(mode: str, folder: Path, resume: Path, *overrides: str, output: str = "rows.jsonl") -> list[dict]:
    """The rows that predict or generate writes with a run, into a file in a folder."""
    given = [f"mode={mode}", f"checkpointing.resume={resume}", f"{mode}.output={folder / output}"]
    quiet = ["train.device=cpu", "memory.guard=false", "tracker=[]"]
    runner.run(compose.from_command_line([*quiet, *given, *overrides], str(folder / "out")))
    return helpers.lines(folder / output)


def configure(run_dir: Path, *overrides: str) -> Config:
    """The configuration of `trainapp OVERRIDES hydra.run.dir=RUN_DIR` over TINY. It may be changed."""
    if any(override.startswith("hydra.searchpath") for override in overrides):  # files that tests write anew
        return compose.from_command_line([*TINY, *overrides], str(run_dir))
    return dataclasses.replace(copy.deepcopy(_composed(overrides)), run_dir=str(run_dir), started=time.time())


def changed(config: Config, values: Mapping[str, Any]) -> Config:
    """A copy with `{"section.key": value}`, also arguments of `data` and `model`: composing costs more than a run."""
    for name, value in values.items():
        section, key = name.split(".")
        part = getattr(config, section)
        is_argument = section in ("data", "model") and not hasattr(part, key)
        change = {"arguments": {**part.arguments, key: value}} if is_argument else {key: value}
        config = dataclasses.replace(config, **{section: dataclasses.replace(part, **change)})
    return config


@functools.lru_cache(256)
def _composed(overrides: tuple[str, ...]) -> Config:
    """Composing takes as long as several steps of a tiny run, and most tests have several runs."""
    return compose.from_command_line([*TINY, *overrides])


def run(run_dir: Path, *overrides: str) -> Any:
    """A run from start to end; with mode=export its files of weights."""
    config = configure(run_dir, *overrides)
    return trained.export(config) if config.mode == "export" else runner.run(config)


def prepare(run_dir: Path, *overrides: str) -> Session:
    """A run that is ready for its next step. The caller closes its tracker."""
    return prepare_session(SessionStart(configure(run_dir, *overrides)), StopRequest(), SingleRank())


def closed(run_dir: Path, *overrides: str) -> Session:
    """A run that is ready for its next step, to look at: its files and workers are closed."""
    session = prepare(run_dir, *overrides)
    session.close()
    return session


def accumulate(session: Session, is_logged: bool = False) -> Totals:
    """Accumulate the gradients of the next step, without clipping them."""
    session.engine.begin(session.begin_update()._replace(is_logged=is_logged))
    watch = functools.partial(memory_watch.watched, session, session.sizes.train)
    batches = session.engine.prepare(session.micro_batches(), watch)
    return loop.accumulate(session.engine, batches, functools.partial(memory_watch.micro_batch_context, session))


def of_whole_batch(session: Session, task: Any, batch: Any = None) -> tuple[float, torch.Tensor]:
    """Mean loss and gradient of the next step's samples, or of a batch, at once, by plain PyTorch."""
    model, numbers = session.state.model, session.batches.share(session.state.progress).numbers
    model.zero_grad()
    loss, count, _ = task(model, session.batches.dataset.__getitems__(numbers) if batch is None else batch)
    (loss / count).backward()
    gradient = gradients(model)
    model.zero_grad(set_to_none=True)
    return float((loss / count).detach()), gradient


def clip(session: Session) -> torch.Tensor:
    """Accumulate and clip the gradients of the next step. Returns their norm before clipping."""
    return session.engine.clip(accumulate(session))


def refusal(run_dir: Path, *overrides: str) -> str:
    """The one line with which a run is refused, before it writes anything of what it did."""
    with pytest.raises(UserError) as refused:
        run(run_dir, *overrides)
    message = str(refused.value)
    assert "\n" not in message
    assert state_of(json_object(run_dir / "result.json")) in ("", "failed")
    return message


class StopAt(StopRequest):
    """A stop, as by Ctrl-C, after the step that is to be the last and, unlike there, after its evaluation."""

    def __init__(self, step: int):
        self.step = step
        self.run: Session | None = None
        super().__init__()

    @property
    def signal(self) -> int:
        """SIGINT once `step` steps are done."""
        is_done = self.run is not None and self.run.state.progress.step >= self.step
        return 2 if is_done and not self.run.awaits_evaluation else 0

    @signal.setter
    def signal(self, number: int | None) -> None:
        assert not number

    agreed = signal.setter(lambda self, number: None)


def run_until(run_dir: Path, step: int, *overrides: str) -> Session:
    """The loop until a stop request after `step` steps, which makes it save, as an interrupted run does."""
    stop = StopAt(step)
    session = prepare_session(SessionStart(configure(run_dir, *overrides)), stop, SingleRank())
    stop.run = session
    try:
        loop.train(session)
    finally:
        session.tracker.close()
    return session


def checkpoint(run_dir: Path, step: int) -> Path:
    """The path of a step's checkpoint."""
    return run_dir / "checkpoints" / f"step_{step:08d}"


def saved(run_dir: Path, step: int) -> dict:
    """The state in the checkpoint of a step: `{"model": {...}, "optimizer": {...}, "average": {...}, ...values}`."""
    path = checkpoint(run_dir, step)
    parts = {"model": {}, "optimizer": {}, "average": {}}  # an empty one has no files
    values = torch.load(path / "values.pt", weights_only=True)
    values["sizes"].pop("seconds", None)  # which differ between runs
    return {**parts, **tensors(path), **values}


def end(run_dir: Path, step: int = 6) -> dict:
    """`saved` without the state of the micro-batch search, a hint that must be validated again after a resume."""
    state = saved(run_dir, step)
    del state["sizes"]
    return state


def resumed(folder: Path, stop: int, *overrides: str) -> tuple[dict, dict]:
    """The `end` of an uninterrupted run in "whole", and of one in "parts" that was resumed after a stop."""
    steps = run(folder / "whole", *overrides).steps
    run_until(folder / "parts", stop, *overrides)
    run(folder / "parts", *overrides)
    return end(folder / "whole", steps), end(folder / "parts", steps)


def tensors(path: Path) -> dict[str, dict]:
    """All tensors of a checkpoint, full and by part, read by torch itself."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.format_utils import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    found: dict = {}
    _load_state_dict(found, storage_reader=FileSystemReader(path), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    assert found
    return found


def differences(a: object, b: object, path: str = "") -> list[str]:
    """Where two nested containers of tensors and plain values are not bit-identical."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        alike = (a.dtype, a.layout) == (b.dtype, b.layout)
        return [] if alike and torch.equal(a.to_dense(), b.to_dense()) else [path]
    if isinstance(a, dict) and isinstance(b, dict):
        lacking = [f"{path}.{key}" for key in a.keys() ^ b.keys()]
        return lacking + [d for key in a.keys() & b.keys() for d in differences(a[key], b[key], f"{path}.{key}")]
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        found = [] if len(a) == len(b) else [f"{path} (length)"]
        return found + [d for i, (x, y) in enumerate(zip(a, b, strict=False)) for d in differences(x, y, f"{path}.{i}")]
    return [] if type(a) is type(b) and a == b else [path]


def weights(model: nn.Module) -> torch.Tensor:
    """All parameters as one vector (a copy)."""
    return torch.cat([p.detach().flatten().clone() for p in model.parameters()])


def gradients(model: nn.Module) -> torch.Tensor:
    """All gradients as one vector (a copy)."""
    return torch.cat([p.grad.flatten().clone() for p in model.parameters()])


def relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    """|value - reference| / |reference|, 2-norms."""
    return float((value - reference).norm() / reference.norm())


def traced_peak(config: Config, size: int) -> int:
    """Planned bytes with micro-batches of `size`, traced in this process."""
    return planner.estimator_of(config, "traced").peak(config, size).total
