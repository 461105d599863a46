"""The cap of the caching allocator, on a device that is made up: `torch.cuda` is replaced as far as it is called."""

import gc
import types

import pytest
import torch

from trainapp.config.schema import Memory
from trainapp.memory.cuda import HEADROOM, CudaMemory

GIB = 2**30
DEVICE = torch.device("cuda", 0)


class Device:
    """80 GiB. Others use `others` bytes of it, this process has reserved `reserved`, of which `cached` is unused."""

    total = 80 * GIB

    def __init__(self, others: int = 0, reserved: int = 0, cached: int = 0):
        self.others, self.reserved, self.cached, self.cap, self.calls = others, reserved, cached, None, []
        self.refused = 0

    def get_device_properties(self, device):
        return types.SimpleNamespace(total_memory=self.total)

    def mem_get_info(self, device):
        self.calls.append("measure")
        return self.total - self.others - self.reserved, self.total

    def memory_reserved(self, device):
        return self.reserved

    def empty_cache(self):
        self.calls.append("empty")
        self.reserved -= self.cached
        self.cached = 0

    def set_per_process_memory_fraction(self, fraction, device):
        assert type(fraction) is float
        assert 0 <= fraction <= 1
        self.calls.append("cap")
        self.cap = fraction * self.total

    def reset_peak_memory_stats(self, device):
        pass

    def get_allocator_backend(self):
        return "native"

    def memory_stats_as_nested_dict(self, device):
        return {"num_ooms": self.refused, "segment": {"all": {"current": 1}}}


@pytest.fixture
def on(monkeypatch):
    def replace(**state) -> Device:
        device = Device(**state)
        for name in [name for name in vars(Device) if not name.startswith("_") and callable(vars(Device)[name])]:
            monkeypatch.setattr(torch.cuda, name, getattr(device, name))
        monkeypatch.setattr(gc, "collect", lambda: device.calls.append("collect"))
        return device

    return replace


def test_without_a_limit_the_allocator_refuses_before_the_driver(on):
    device = on(others=20 * GIB)
    memory = CudaMemory(DEVICE, Memory())
    assert device.cap == pytest.approx(59 * GIB)
    assert memory.enforced == 59 * GIB
    assert (memory.limit, memory.budget) == (None, 80 * GIB)  # what sizes are remembered for must not vary with others
    assert HEADROOM == GIB


def test_a_limit_is_the_cap_whatever_is_free(on):
    device = on(others=20 * GIB)
    for setting, cap in (("8GiB", 8 * GIB), (1.0, 80 * GIB), (0.5, 40 * GIB)):
        memory = CudaMemory(DEVICE, Memory(limit=setting))
        assert memory.enforced == memory.limit == cap
        assert device.cap == pytest.approx(cap)


def test_what_an_earlier_run_has_left_is_freed_first(on):
    device = on(reserved=70 * GIB, cached=69 * GIB)
    memory = CudaMemory(DEVICE, Memory())
    assert device.calls == ["collect", "empty", "measure", "cap"]
    assert memory.enforced == 79 * GIB


def test_the_cap_is_measured_anew(on):
    """With what is reserved already, and less what libraries have taken meanwhile."""
    device = on()
    memory = CudaMemory(DEVICE, Memory())
    assert memory.enforced == 79 * GIB
    device.reserved, device.others = 30 * GIB, 2 * GIB
    memory.enforce()
    assert memory.enforced == 77 * GIB
    assert device.cap == pytest.approx(77 * GIB)


def test_a_full_device_leaves_a_cap(on):
    device = on(others=80 * GIB - 2**20)
    assert CudaMemory(DEVICE, Memory()).enforced == 2**20 - 2**17
    assert device.cap > 0


def test_refused_allocations(on):
    device = on()
    memory = CudaMemory(DEVICE, Memory())
    assert memory.refused_allocations() == 0
    device.refused = 5
    assert memory.refused_allocations() == 5
