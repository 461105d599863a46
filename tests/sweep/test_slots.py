"""How a machine is divided among the jobs of a sweep. GPUs are known by their names; nothing runs on them."""

import pytest

from trainapp.config import compose
from trainapp.errors import UserError
from trainapp.sweep.slots import divide_machine


@pytest.fixture
def slots(monkeypatch, tmp_path):
    """The slots of a machine with four GPUs and eight cores, where no number of threads is set."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,GPU-7")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)), raising=False)

    def divided(parallel, *overrides, packs=False):
        config = compose.from_command_line(["model=mlp", *overrides], str(tmp_path))
        return config, divide_machine(parallel, config, packs)

    return divided


def test_one_job_per_gpu_with_its_share_of_the_cores(slots):
    config, found = slots("auto")
    assert [slot.gpus for slot in found] == [("4",), ("5",), ("6",), ("GPU-7",)]
    assert [(slot.cores, slot.threads) for slot in found[:2]] == [((0, 1), 2), ((2, 3), 2)]
    assert all(slot.memory_overrides(config) == [] for slot in found)


def test_a_job_takes_as_many_gpus_as_it_has_ranks(slots):
    assert [slot.gpus for slot in slots("auto", "parallel=ddp", "parallel.devices=2")[1]] == [
        ("4", "5"),
        ("6", "GPU-7"),
    ]
    assert [slot.gpus for slot in slots("auto", "parallel=ddp")[1]] == [("4", "5", "6", "GPU-7")]
    with pytest.raises(UserError, match=r"parallel\.devices=5: this machine has 4 GPUs"):
        slots("auto", "parallel=ddp", "parallel.devices=5")


def test_a_sweep_of_fsdp_on_one_device_is_refused(slots, monkeypatch):
    with pytest.raises(UserError, match=r"parallel=fsdp with parallel\.devices=1: "):
        slots("auto", "parallel=fsdp", "parallel.devices=1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4")
    with pytest.raises(UserError, match=r"parallel=fsdp with parallel\.devices=auto: "):
        slots("auto", "parallel=fsdp")
    assert len(slots("auto", "parallel=ddp")[1]) == 1


@pytest.mark.parametrize(("limit", "share"), [("8GiB", 4 * 2**30), ("0.5", 0.25), ("null", 0.45)])
def test_jobs_on_one_gpu_share_its_memory(slots, limit, share):
    config, found = slots(8, f"memory.limit={limit}")
    assert [slot.gpus for slot in found[3:6]] == [("GPU-7",), ("4",), ("5",)]
    assert {text for slot in found for text in slot.memory_overrides(config)} == {f"memory.limit={share}"}


def test_without_gpus_and_packed(slots):
    assert [(slot.gpus, slot.cores) for slot in slots("auto", "train.device=cpu")[1]] == [(None, None)]
    config, found = slots(2, "train.device=cpu", "memory.limit=1GiB")
    assert [slot.cores for slot in found] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert found[0].memory_overrides(config) == [f"memory.limit={2**29}"]
    assert len(slots("auto", packs=True)[1]) == 16
