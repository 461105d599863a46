"""After a recovery: no sample lost or repeated, no tensor of the failed step left, the same weights."""

import itertools
import json
import weakref
from collections.abc import Iterable

import pytest
import runs
import torch
from faults import PHASES, Fault, Injector, injected
from harness import Recorded
from runs import relative_error, weights
from torch.utils._python_dispatch import TorchDispatchMode

from trainapp.config.schema import Config
from trainapp.errors import TrainingStopped
from trainapp.memory.cpu import CpuMemory
from trainapp.oom import recovery
from trainapp.run import runner
from trainapp.run.recover import recover
from trainapp.training.engine import Engine

from .conftest import MODELS, cell, limit_between, prepared, tiny

# Models whose result does not depend on how a batch is cut: no BatchNorm, no dropout.
SAME = {
    "mlp": ("model=mlp", "model.width=32", "data=digits"),
    "resnet": ("model=resnet", "model.width=4", "model.norm=group", "data=digits", "data.augment=true"),
    "gpt": tuple(part for part in MODELS["gpt"] if "dropout" not in part),
}


@pytest.mark.parametrize("phase", ["forward", "evaluate", "commit"])
@pytest.mark.parametrize("size", [8, 1])
def test_a_process_that_cannot_recover_says_how_to_continue(tmp_path, phase, size):
    """The driver refuses to map memory, after which the allocator of expandable segments fails for good."""
    config = tiny(tmp_path, *MODELS["mlp"], "every.eval=1", f"batch.micro_size={size}")
    injector = Injector([fault := Fault(phase, 2, kind="driver", times=9)])
    with pytest.raises(TrainingStopped) as caught:
        Recorded(config, injector=injector)
    assert injector.fired[fault] == 1  # nothing is retried
    message = str(caught.value)
    assert message.startswith(f"out of memory at step 2 in {phase}")
    assert "the allocator of expandable segments is unusable for the rest of this process" in message
    assert f"\n  {config.command}" in message
    assert len(list((tmp_path / "oom").glob("*.json"))) == 1


def test_an_evaluation_that_cannot_recover_says_that_it_begins_again(tmp_path, monkeypatch):
    """No process takes its place."""
    runs.run(tmp_path / "run", *MODELS["mlp"], "train.max_steps=1", "train.max_epochs=null")
    resume = f"checkpointing.resume={tmp_path / 'run/checkpoints/step_00000001'}"
    config = tiny(tmp_path / "eval", *MODELS["mlp"], "mode=eval", resume, "batch.eval_micro_size=8")

    def refuse(*_):
        raise RuntimeError("CUDA driver error: out of memory")

    monkeypatch.setattr(Engine, "evaluate", refuse)
    with pytest.raises(TrainingStopped) as caught:
        runner.run(config)
    message = str(caught.value)
    assert "only a new process can do this work, with micro-batch 4 instead of 8" in message
    advice = "Begin this mode=eval again in a new process, with a memory.limit below the driver's"
    assert f"{advice}:\n  {config.command}" in message


@pytest.mark.slow
@pytest.mark.parametrize("model", SAME)
def test_each_sample_once_and_the_same_weights(tmp_path, model):
    # The default sizes run for one and a half epochs, which covers a partial step and a reshuffle.
    samples = 1437 if "data=digits" in SAME[model] else 200
    overrides = (
        *SAME[model],
        "optimizer=sgd",
        "optimizer.lr=0.01",
        "every.log=null",
        f"train.max_steps={int(1.5 * samples / 64) + 1}",
    )
    sizes = {"batch.global_size": 64}
    limit = limit_between(tmp_path, (*overrides, "batch.global_size=64"), 16, 32)
    recorded = Recorded(
        tiny(tmp_path / "run", *overrides, changes={**sizes, "batch.micro_size": "auto", "memory.limit": limit})
    )
    assert [(f.recovery.old_size, f.recovery.new_size) for f in recorded.failures] == [(64, 32), (32, 16)]
    first_epoch = sorted(i for _, epoch, indices in recorded.fetched if epoch == 0 for i in indices)
    assert first_epoch == list(range(samples))
    second = [i for _, epoch, indices in recorded.fetched if epoch == 1 for i in indices]
    assert len(second) == len(set(second)) > 0
    plan = {f.step: f.recovery.new_size for f in recorded.failures}
    configured = Recorded(
        tiny(tmp_path / "wanted", *overrides, schedule=plan, changes={**sizes, "batch.micro_size": 64})
    )
    assert recorded.fetched == configured.fetched
    assert torch.equal(weights(recorded.run.state.model), weights(configured.run.state.model))
    whole = Recorded(tiny(tmp_path / "whole", *overrides, changes={**sizes, "batch.micro_size": 64}))
    assert relative_error(weights(recorded.run.state.model), weights(whole.run.state.model)) < 1e-4


class Storages(TorchDispatchMode):
    """Weak references to the storage of every tensor that an operation has made since `begin`."""

    def __init__(self):
        super().__init__()
        self.before: set[int] = set()
        self.seen: dict[int, weakref.ref] = {}

    def begin(self, resident: Iterable[torch.Tensor]) -> None:
        """Reset the record; views of `resident` tensors do not count."""
        self.seen.clear()
        self.before = {tensor.untyped_storage()._cdata for tensor in resident}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for item in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(item, torch.Tensor) and item.untyped_storage()._cdata not in self.before:
                storage = item.untyped_storage()
                self.seen[storage._cdata] = weakref.ref(storage)
        return result

    def alive(self) -> int:
        """How many have not been freed."""
        return sum(ref() is not None for ref in self.seen.values())


def failed_attempt(config: Config, fault: Fault):
    """A run that fails: the run, its report, and the tensors that the step made."""
    run, storages = prepared(config), Storages()
    take = run.snapshot.take

    def noting(*arguments):
        take(*arguments)
        if run.state.progress.step + 1 == fault.step:
            run.state.optimizer.zero_grad(set_to_none=True)
            storages.begin(t for tensors in run.meter.resident().values() for t in tensors)

    run.snapshot.take = noting
    with storages, injected(Injector([fault])):
        failure = runner.run_until_oom(run)
    run.snapshot.take = take
    return run, failure, storages


# The last: what torch's engine keeps of a backward that fails in one branch while another waits.
PLACES = [*zip(PHASES, itertools.cycle(MODELS), itertools.repeat(1)), ("backward", "gpt", 60)]


@pytest.mark.slow
@pytest.mark.parametrize(("phase", "model", "operation"), PLACES)
def test_memory_is_back_to_what_it_was(tmp_path, phase, model, operation):
    config = tiny(tmp_path, *cell(model, "fp32"))
    run, failure, storages = failed_attempt(config, Fault(phase, 2, operation))
    assert failure.phase == phase
    assert storages.seen
    recovered = recover(run, failure)
    run.close()
    assert recovered is None
    assert storages.alive() == 0


@pytest.mark.slow
def test_a_kept_error_would_keep_the_memory(tmp_path, monkeypatch):
    # Negative control: what the report must not hold.
    kept = []
    describe = runner.describe
    monkeypatch.setattr(runner, "describe", lambda run, error, kind: kept.append(error) or describe(run, error, kind))
    config = tiny(tmp_path, *cell("mlp", "fp32"))
    run, failure, storages = failed_attempt(config, Fault("backward", 2, 1))
    recover(run, failure)
    run.close()
    assert storages.alive() > 0


@pytest.mark.slow
def test_nothing_left_to_halve(tmp_path):
    injector = Injector([fault := Fault("forward", 2, 1, above=0)])
    with pytest.raises(TrainingStopped, match="nothing is left to halve"):
        Recorded(tiny(tmp_path, *cell("mlp", "fp32"), "oom.techniques=none"), injector=injector)
    assert injector.fired[fault] == 4  # at 8, 4, 2 and 1


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [None, {1: 8}])
def test_commit_that_never_fits_ends(tmp_path, schedule):
    injector = Injector([fault := Fault("commit", 1, times=100)])
    with pytest.raises(TrainingStopped):
        Recorded(tiny(tmp_path, *cell("mlp", "fp32"), schedule=schedule), injector=injector)
    assert injector.fired[fault] == 4


NADAM = ("optimizer={_target_: foreign.ListsByDefault, lr: 0.002}", "user_packages=[foreign]")


@pytest.mark.slow
@pytest.mark.parametrize("is_asked_for", [False, True])
def test_an_optimizers_step_is_first_retried_without_copies_of_all_parameters(tmp_path, is_asked_for):
    """With the same micro-batch, unless the kernels that make them are asked for."""
    chosen = ("+optimizer.foreach=true",) if is_asked_for else ()
    config = tiny(tmp_path, *MODELS["mlp"], *NADAM, *chosen, "batch.micro_size=8", "train.max_steps=4")
    ended = Recorded(config, Fault("commit", 2))
    (report,) = (tmp_path / "oom").glob("*.json")
    action = json.loads(report.read_text())["action"]
    if is_asked_for:
        assert action.endswith("with micro-batch 8 -> 4")
    else:
        assert action.endswith("with optimizer.foreach=false, whose kernels make no temporary copies of the parameters")
        assert "8 -> 4" not in action
    assert ended.run.state.optimizer.defaults["foreach"] is is_asked_for


def test_off_lets_it_through(tmp_path):
    with pytest.raises(torch.OutOfMemoryError):
        Recorded(tiny(tmp_path, *cell("mlp", "fp32"), changes={"oom.enabled": False}), Fault("forward", 2, 1))


def test_an_error_of_the_users_passes(tmp_path):
    with pytest.raises(ValueError, match="says the user"):
        Recorded(tiny(tmp_path, *cell("mlp", "fp32")), Fault("forward", 2, 1, kind="exception"))


def test_recovery_runs_outside_except(tmp_path, monkeypatch):
    import sys

    handled = []
    undo = recovery.rollback

    def looking(*arguments, **options):
        handled.append(sys.exc_info()[0])
        undo(*arguments, **options)

    monkeypatch.setattr(recovery, "rollback", looking)
    Recorded(tiny(tmp_path, *cell("mlp", "fp32")), Fault("forward", 2, 1))
    assert handled == [None]


def test_the_memory_that_is_free_is_measured_again(tmp_path, monkeypatch):
    """On CUDA without a limit: others may have taken some since the cap was set. After the failed step is freed."""
    calls = []
    for name in ("release", "enforce"):
        method = getattr(CpuMemory, name)
        monkeypatch.setattr(CpuMemory, name, lambda self, name=name, method=method: calls.append(name) or method(self))
    fault = Fault("backward", 2)
    Recorded(tiny(tmp_path, *MODELS["mlp"], "every.eval=null"), fault)
    assert calls[-2:] == ["release", "enforce"]
