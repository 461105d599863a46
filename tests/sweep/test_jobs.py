"""Which jobs share a device. Their plans and processes are stand-ins: only what is decided by them is real."""

from types import SimpleNamespace

import pytest

from trainapp.config import compose
from trainapp.config.schema import Sweep
from trainapp.sweep import jobs
from trainapp.sweep.composing import ComposedJob
from trainapp.sweep.jobs import MemoryNeed, RunningJobs
from trainapp.sweep.journal import Trial

DEVICE = 90  # bytes that all jobs may use together


def need(size, is_infeasible=False):
    """A plan's answer."""
    return MemoryNeed(size, DEVICE, micro_size=8, is_infeasible=is_infeasible)


class Machine:
    """A machine whose jobs need the given memory, by number; each runs until it is ended."""

    def __init__(self, folder, monkeypatch, needs):
        config = compose.from_command_line(["model=mlp", "train.device=cpu"], str(folder))
        composer = SimpleNamespace(command=lambda job, overrides, plan_folder=None: [str(job.number)])
        self.running = RunningJobs(Sweep(pack=True, parallel=3), composer, config, launcher=None)
        self.overrides = {}
        self.plans = []
        self._folder = folder
        self._config = config

        def plan_memory(command, plan_folder, slot):
            self.plans.append(int(command[0]))
            return needs[int(command[0])]

        def start(command, overrides, job_folder, slot, threads):
            self.overrides[int(command[0])] = overrides
            return SimpleNamespace(poll=lambda: None)

        monkeypatch.setattr(jobs, "plan_memory", plan_memory)
        monkeypatch.setattr(jobs, "start_process", start)

    def job(self, number):
        return ComposedJob(number, str(number), [], self._folder / str(number), self._config)

    def start(self, number):
        """Start a job if it fits. Return whether it did."""
        job = self.job(number)
        memory = self.running.memory_need(job)
        slot = self.running.fitting_slot(memory)
        if slot is None:
            self.running.wait_for_memory(Trial(number, ()), memory)
            return False
        self.running.start(Trial(number, ()), job, slot, None, memory)
        return True

    def end(self, number):
        """End a job."""
        self.running.remove(self.running.by_trial[number])


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A function that returns a machine whose jobs have these needs."""
    return lambda *needs: Machine(tmp_path, monkeypatch, needs)


def test_jobs_run_together_while_their_needs_fit(machine):
    one = machine(need(50), need(30), need(20))
    assert one.start(0)
    assert one.start(1)
    assert not one.start(2)  # 100 of 90
    assert not one.running.can_start
    one.end(1)
    assert one.running.can_start
    assert one.start(2)
    assert one.plans == [0, 1, 2]  # each is planned once
    assert one.overrides[0] == ["memory.limit=50", "batch.eval_micro_size=8"]


def test_a_job_that_needs_more_than_the_share_has_the_device_alone(machine):
    one = machine(need(95), need(10))
    assert one.start(0)
    assert one.overrides[0] == []  # it has the limit of the device
    assert not one.start(1)
    one.end(0)
    assert one.start(1)


def test_a_job_without_an_estimate_has_the_device_alone(machine):
    one = machine(need(10), None)
    assert one.start(0)
    assert not one.start(1)
    one.end(0)
    assert one.start(1)
    assert one.overrides[1] == []


def test_a_job_that_does_not_fit_beside_others_is_planned_once_more(machine):
    one = machine(need(10), need(200, is_infeasible=True))
    assert one.start(0)
    assert not one.start(1)
    one.end(0)
    one.running.memory_need(one.job(1))
    assert one.plans == [0, 1, 1]


def test_no_more_jobs_start_than_there_are_slots(machine):
    one = machine(need(10), need(10), need(10))
    assert [one.start(number) for number in range(3)] == [True] * 3
    assert not one.running.can_start
