"""The modes of a trace answer at once where a tensor is: what passes through all of them is most of a trace's time."""

import pytest
import torch
from recorded_operations import RecordedOperations

from trainapp.memory.live_tensors import LiveTensors
from trainapp.planning.cuda.pretend import EngineOnCuda
from trainapp.planning.step_work import WorkCounter
from trainapp.planning.values import MadeUpValues
from trainapp.torch_operators import ASKS_DEVICE
from trainapp.torch_private import DispatchMode, fake_tensor_mode
from trainapp.train.phase import Phase


class PassesOn(DispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def seen_below(mode):
    with fake_tensor_mode(), RecordedOperations() as below, mode:
        weight = torch.ones(4, 4, requires_grad=True)
        (torch.ones(4, 4) @ weight).sum().backward()
        assert weight.grad.device == torch.device("cpu")
    assert torch.ops.aten.mm.default in below.seen
    return below.seen


@pytest.mark.parametrize("mode", [LiveTensors, EngineOnCuda, MadeUpValues, lambda: WorkCounter(lambda: Phase.FORWARD)])
def test_devices_are_not_asked_below(mode):
    assert ASKS_DEVICE in seen_below(PassesOn())
    assert ASKS_DEVICE not in seen_below(mode())
