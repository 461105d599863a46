"""The order of a rollback, and errors of the device that surface only in it."""

import logging
import weakref

import pytest
import torch
from faults import Fault, Injector, injected
from harness import Recorded
from runs import weights

from trainapp.run import runner
from trainapp.run.recover import recover
from trainapp.training.attempt import rollback
from trainapp.training.phase import Phase

from .conftest import cell, prepared, tiny

pytestmark = pytest.mark.usefixtures("without_pictures")


class Steps:
    """Notes the calls of a recovery in order, with whether the failed attempt's loss still existed."""

    def __init__(self, run, injector):
        self.calls: list[tuple[str, bool]] = []
        self.loss = lambda: None
        self.watch(run.memory, "synchronize", "release", "dump")
        self.watch(run.batches, "drop_fetched")
        self.watch(run.strategy, "abort_step")
        self.watch(run.state.optimizer, "zero_grad")
        self.watch(run.snapshot, "restore")
        fail = injector.fail

        def failing(fault):
            self.calls.clear()
            return fail(fault)

        injector.fail = failing
        run.state.model.register_forward_hook(self.note_output)

    def note_output(self, model, inputs, output):
        self.loss = weakref.ref(output)

    def watch(self, owner, *names):
        for name in names:
            setattr(owner, name, self.noting(name, getattr(owner, name)))

    def noting(self, name, function):
        def call(*arguments, **options):
            self.calls.append((name, self.loss() is not None))
            return function(*arguments, **options)

        return call


def test_the_order_of_a_rollback(tmp_path):
    """First the device comes to rest, while the failed attempt's tensors exist; they go, and only then the cache."""
    injector = Injector([Fault("loss", 2)])
    run = prepared(tiny(tmp_path, *cell("mlp", "fp32")))
    steps = Steps(run, injector)
    with injected(injector):
        failure = runner.run_until_oom(run)
    assert failure.phase == "loss"
    assert steps.calls == [("synchronize", True)]
    assert recover(run, failure) is None
    calls = list(steps.calls)
    run.close()
    assert [name for name, _ in calls[1:5]] == ["synchronize", "drop_fetched", "zero_grad", "release"]
    assert calls[5:] == [("restore", False), ("dump", False)]


def test_with_other_ranks_the_step_is_aborted_after_the_device_has_come_to_rest(tmp_path):
    run = prepared(tiny(tmp_path, *cell("mlp", "fp32")))
    run.snapshot.take()
    steps = Steps(run, Injector())
    rollback(run, Phase.DATA, other_ranks_wait=True)
    run.close()
    assert [name for name, _ in steps.calls[:4]] == ["synchronize", "drop_fetched", "abort_step", "zero_grad"]


FAULT = [Fault("forward", 2)]


def failing_while_waiting(folder, message, times=1):
    """A run that runs out of memory in step 2; waiting for the device then raises `message`."""
    run = prepared(tiny(folder, *cell("mlp", "fp32")))
    raised = []

    def synchronize():
        if len(raised) < times:
            raised.append(message)
            raise RuntimeError(message)

    run.memory.synchronize = synchronize
    return run, raised


def test_another_error_ends_the_run(tmp_path):
    run, _ = failing_while_waiting(tmp_path, "CUDA error: initialization error")
    with injected(Injector(FAULT)), pytest.raises(RuntimeError, match="initialization error") as caught:
        runner.run_until_oom(run)
    run.close()
    assert isinstance(caught.value.__context__, torch.OutOfMemoryError)


def test_a_second_lack_of_memory_is_covered_by_the_same_recovery(tmp_path, caplog):
    plain = Recorded(tiny(tmp_path / "plain", *cell("mlp", "fp32")), *FAULT)
    run, raised = failing_while_waiting(tmp_path / "late", "CUDA error: out of memory")
    with caplog.at_level(logging.WARNING), injected(Injector(FAULT)):
        while (failure := runner.run_until_oom(run)) is not None:
            recover(run, failure)
    run.close()
    assert len(raised) == 1
    assert "while waiting for the device after it had run out of memory: CUDA error: out of memory" in caplog.text
    assert run.sizes.oom_restarts == 1
    assert torch.equal(weights(run.state.model), weights(plain.run.state.model))
