"""What is pretended of CUDA, one by one in force and not: a program, since parts of torch are replaced for good.

Reads names of functions below from its arguments and prints what each returns, as JSON.
"""

import contextlib
import json
import os
import sys
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import optimizer
from torch.utils import _foreach_utils

from trainapp.accelerator import HERE
from trainapp.memory.live_tensors import LiveTensors
from trainapp.planning.cuda import attention, devices, pretend, self_test
from trainapp.planning.cuda.place import NotHere
from trainapp.planning.ranks import simulated
from trainapp.planning.values import MadeUpValues
from trainapp.techniques import offload
from trainapp.torch_private import fake_tensor_mode

A100, V100 = devices.find("a100-80gb"), devices.find("v100-32gb")


@contextlib.contextmanager
def inside(device=A100):
    with pretend.pretended(device), fake_tensor_mode(), MadeUpValues(), pretend.EngineOnCuda() as engine:
        yield engine


def refusal(device, engine):
    try:
        self_test.require(device, engine)
    except self_test.NotInForce as error:
        return str(error)
    return None


def all_in_force():
    found = {}
    for name, device in devices.DEVICES.items():
        with inside(device) as engine:
            found[name] = refusal(device, engine)
    return found


def no_guard():
    with mock.patch.object(pretend, "give_autograd_a_device"), inside() as engine:
        return refusal(A100, engine)


def no_attention():
    def unchanged(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))

    with mock.patch.object(attention.FunctionsOf, "__torch_function__", unchanged), inside() as engine:
        return refusal(A100, engine)


def attention_in_the_forward_alone():
    def off_in_backward(self, loss, *args, **kwargs):
        return torch.Tensor.backward(loss, *args, **kwargs)

    with mock.patch.object(attention.FunctionsOf, "_backward", off_in_backward), inside() as engine:
        return refusal(A100, engine)


def another_devices_attention():
    with inside(V100) as engine:
        return refusal(A100, engine)


def no_autocast():
    with (
        inside() as engine,
        mock.patch.object(torch.cuda.amp.common, "amp_definitely_not_available", return_value=True),
    ):
        return refusal(A100, engine)


def no_streams():
    with inside() as engine, mock.patch.object(torch.cuda, "stream", return_value=contextlib.nullcontext()):
        return refusal(A100, engine)


def sharded_in_force():
    """On two ranks and on 512, and again in another trace."""
    found = []
    for world in (2, 512, 2):
        with simulated(0, world, torch.device("cpu")), inside() as engine:
            found.append(refusal(A100, engine))
    return found


def sharded_without_foreach():
    """As where DTensor adds itself to a list that is in force for one trace alone."""
    from torch.distributed.tensor import DTensor

    with simulated(0, 2, torch.device("cpu")), inside() as engine:
        optimizer._foreach_supported_types.remove(DTensor)
        try:
            return refusal(A100, engine)
        finally:
            optimizer._foreach_supported_types.append(DTensor)


def sharded_on_one_stream():
    with (
        simulated(0, 2, torch.device("cpu")),
        inside() as engine,
        mock.patch.dict(self_test._CHECKS, {"the allocation on streams": lambda device, engine: True}),
        mock.patch.object(torch.cuda, "stream", return_value=contextlib.nullcontext()),
    ):
        return refusal(A100, engine)


def pinned():
    """What FSDP asks of a shard that it keeps on the host."""
    with inside():
        shard = torch.empty(4)
        return [shard.pin_memory() is shard, shard.is_pinned(), torch.empty(4, device="cuda").is_pinned()]


def no_foreach():
    with inside() as engine:
        for module in (optimizer, _foreach_utils):
            module._foreach_supported_types = [t for t in module._foreach_supported_types if t is not FakeTensor]
        return refusal(A100, engine)


def no_accumulation():
    with pretend.pretended(A100), fake_tensor_mode(), MadeUpValues():
        return refusal(A100, pretend.EngineOnCuda())


def bytes_of_attention():
    """What attention keeps for the backward, and the peak of the backward above it, by device and dtype."""
    found = {}
    for device in (A100, V100):
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            with inside(device):
                q, k, v = (torch.empty(2, 4, 256, 64, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3))
                with LiveTensors(devices=("cuda",)) as counter, pretend.EngineOnCuda():
                    result = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
                    kept = counter.live
                    gradient = torch.empty_like(result)
                    result.backward(gradient)
                found[f"{device.name} {str(dtype)[6:]}"] = [kept, counter.peak]
    return found


def autocast_reaches_attention():
    """Queries in fp32, as after a rotation, and values in bf16."""
    with inside(), torch.autocast("cuda", torch.bfloat16):
        q, k = (torch.empty(2, 4, 256, 64, device="cuda", requires_grad=True) for _ in range(2))
        v = torch.empty(2, 4, 256, 64, device="cuda", dtype=torch.bfloat16)
        return str(nn.functional.scaled_dot_product_attention(q, k, value=v).dtype)


def residual_gradients():
    """The peak of a backward through two uses of one tensor, in units of it, with and without additions in place."""
    found = []
    for engine in (pretend.EngineOnCuda(), contextlib.nullcontext()):
        with pretend.pretended(A100), fake_tensor_mode(), MadeUpValues(), engine:
            x = torch.empty(1024, 1024, device="cuda", requires_grad=True)
            y = x * 1
            z, gradient = y * 2 + y * 3, torch.empty_like(x)
            with LiveTensors(devices=("cuda",)) as counter:
                z.backward(gradient)
            found.append(counter.peak / x.nbytes)
    return found


def filled_gradients():
    """The peaks of backwards that fill zeros, in units of the input, with and without doing so in place."""
    functions = {
        "max": lambda x, rows: x.max(1)[0],
        "gather": lambda x, rows: x.gather(0, rows[None]),
        "index_select": lambda x, rows: x.index_select(0, rows),
    }
    found = {}
    for engine in (pretend.EngineOnCuda(), contextlib.nullcontext()):
        with pretend.pretended(A100), fake_tensor_mode(), MadeUpValues(), engine:
            rows = torch.zeros(8, dtype=torch.long, device="cuda")
            for name, function in functions.items():
                x = torch.empty(512, 1024, device="cuda", requires_grad=True)
                result = function(x, rows)
                gradient = torch.empty_like(result)
                with LiveTensors(devices=("cuda",)) as counter:
                    result.backward(gradient)
                found.setdefault(name, []).append(round(counter.peak / x.nbytes))
    return found


def recurrent():
    with inside():
        try:
            nn.LSTM(8, 16, device="cuda")(torch.empty(4, 2, 8, device="cuda"))
        except NotImplementedError as error:
            return str(error)


class Moved(offload.Offload):
    """Notes the bytes of every storage that leaves the device."""

    def __init__(self, model, *arguments):
        super().__init__(model, *arguments)
        self.bytes, store = [], self._copies.store

        def noted(storage, device):
            self.bytes.append(storage.nbytes())
            return store(storage, device)

        self._copies.store = noted


def offloaded():
    """The bytes of each storage that offload moves in two steps of one network, and what is left: there, on streams of
    its own too, and here.
    """
    found = []
    with mock.patch.object(offload, "LEAST", 1):
        for device, arguments in (("cuda", ("cuda", NotHere())), ("cuda", ("cuda", HERE)), ("cpu", ("cpu",))):
            with inside() if device == "cuda" else contextlib.nullcontext():
                layers = [nn.Linear(8, 8, device=device), nn.GELU(), nn.LayerNorm(8, device=device)]
                model, inputs = nn.Sequential(*layers), torch.ones(4, 8, device=device)
                moving = Moved(model, *arguments)
                with LiveTensors(devices=(device,)) as counter:
                    for _ in range(2):
                        with moving.forward():
                            loss = model(inputs).square().sum()
                        loss.backward()
                        del loss
                found.append({"moved": moving.bytes, "left": counter.live})
    return found


if __name__ == "__main__":
    answers = {name: globals()[name]() for name in sys.argv[1:]}
    print(json.dumps(answers), flush=True)
    os._exit(0)  # the engine's threads still point to what was made here
