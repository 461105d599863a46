"""What is pretended of CUDA, one by one: a program, since parts of torch are replaced for good.

Prints, as JSON, what each of the functions below returns that its arguments name.
"""

import contextlib
import dataclasses
import json
import os
import sys
from unittest import mock

import torch
import torch.nn.functional as F
from recorded_gpt import RecordedAdamW, RecordedGPT, cross_entropy
from recorded_operations import RecordedOperations
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from trainapp.memory.live_tensors import LiveTensors
from trainapp.planning import absent_gpu, cuda_kernels, pretend
from trainapp.planning.absent_gpu import DEVICES, MIB, AbsentGpu
from trainapp.planning.simulated_ranks import simulated
from trainapp.planning.values import MadeUpValues
from trainapp.techniques import offload
from trainapp.torch_private import fake_tensor_mode, local, outside_dispatch_modes

A100, V100 = (AbsentGpu(name, DEVICES[name][0] * MIB, DEVICES[name][1]) for name in ("a100-80gb", "v100-32gb"))


@contextlib.contextmanager
def inside(gpu=A100, engine=True):
    with (
        gpu.pretended(),
        fake_tensor_mode(),
        MadeUpValues(),
        cuda_kernels.EngineOnCuda() if engine and not gpu.on_cpu else contextlib.nullcontext(),
    ):
        yield


def tensor(*shape, dtype=torch.float32):
    return torch.empty(*shape, device="cuda", dtype=dtype, requires_grad=True)


def backward():
    with inside():
        weight = tensor(4, 4)
        (weight @ weight.detach()).sum().backward()
        return str(weight.grad.device)


def numerics():
    """Products and norms under autocast, the loss scaler, foreach kernels."""
    with inside():
        weight = tensor(4, 4)
        with torch.autocast("cuda", torch.float16):
            product = weight @ weight
            kinds = [str(product.dtype), str(F.layer_norm(product, (4,)).dtype)]
        weights = [tensor(4), tensor(4)]
        for one in weights:
            one.grad = torch.empty_like(one)
        with RecordedOperations() as seen:
            torch.optim.Adam(weights).step()
            nn.utils.clip_grad_norm_(weights, 1.0)
        return [*kinds, torch.amp.GradScaler("cuda").is_enabled(), seen.names.count("_foreach_lerp_")]


def no_autocast():
    patch = mock.patch.object(torch.cuda.amp.common, "amp_definitely_not_available", return_value=True)
    with inside(), patch:
        return torch.amp.GradScaler("cuda").is_enabled()


def bytes_of_attention():
    """What attention keeps for the backward, and the peak of the backward above it, by device and dtype."""
    found = {}
    for gpu in (A100, V100):
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            with inside(gpu, engine=False):
                q, k, v = (tensor(2, 4, 256, 64, dtype=dtype) for _ in range(3))
                with LiveTensors(devices=("cuda",)) as counter, cuda_kernels.EngineOnCuda():
                    result = F.scaled_dot_product_attention(q, k, v, is_causal=True)
                    kept = counter.live
                    result.backward(torch.empty_like(result))
                found[f"{gpu.name} {str(dtype)[6:]}"] = [kept, counter.peak]
    return found


def recomputed_attention():
    """The kernel that the backward of a checkpointed block takes."""
    with inside(), RecordedOperations() as seen:
        q, k, v = (tensor(1, 2, 16, 16, dtype=torch.float16) for _ in range(3))
        torch.utils.checkpoint.checkpoint(F.scaled_dot_product_attention, q, k, v, use_reentrant=False).sum().backward()
        return [name for name in seen.names if "attention" in name and not name.endswith("_backward")]


def residual_gradients():
    """The peak of a backward through two uses of one tensor, in units of it, with and without additions in place."""
    found = []
    for engine in (True, False):
        with inside(engine=engine):
            x = tensor(1024, 1024)
            y = x * 1
            z, gradient = y * 2 + y * 3, torch.empty_like(x)
            with LiveTensors(devices=("cuda",)) as counter:
                z.backward(gradient)
            found.append(counter.peak / x.nbytes)
    return found


def sharded():
    """On two ranks and on 512: the shape of a shard's gradient."""
    found = []
    for world in (2, 512):
        with simulated(0, world, torch.device("cpu")), inside():
            with outside_dispatch_modes():
                mesh = init_device_mesh("cuda", (world,))
            layer = nn.Linear(4, world, bias=False, device="cuda:0")
            fully_shard(layer, mesh=mesh)
            layer(tensor(2, 4)).sum().backward()
            found.append(list(local(layer.weight.grad).shape))
    return found


def on_the_cpu():
    """With CUDA's rules: dtype of a norm under autocast, what dropout keeps, and what attention with dropout keeps."""
    with inside(dataclasses.replace(A100, on_cpu=True)):
        x = torch.empty(64, 64, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            norm = str(F.layer_norm(x @ x, (64,)).dtype)
        with LiveTensors() as counter:
            dropped = F.dropout(x, 0.1)
            kept = counter.live
            del dropped
        q, k, v = (torch.empty(2, 4, 256, 64, requires_grad=True) for _ in range(3))
        with LiveTensors() as counter:
            attended = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)
            return [norm, kept / x.nbytes, counter.live / attended.nbytes]


def offloaded():
    """Bytes that activations take on the device after a forward, without and with offload."""
    found = []
    with mock.patch.object(offload, "LEAST", 1), inside():
        layers = nn.Sequential(*(nn.Linear(64, 64, device="cuda") for _ in range(4)))
        for forward in (layers, offload.Offload(layers).wrap_compute(layers)):
            with LiveTensors(devices=("cuda",)) as counter:
                loss = forward(torch.ones(4, 64, device="cuda")).square().sum()
                found.append(counter.live)
                loss.backward()
                del loss
    return found


def snapshots():
    """MiB allocated at the peak of a warm step of `recorded_gpt`, with cuBLAS's workspaces, by context length."""
    found = {}
    for context, autocast in ((128, False), (256, False), (512, True), (1024, True)):
        with inside(), LiveTensors(devices=("cuda",)) as counter, torch.device("cuda"):
            model = RecordedGPT(10_000, context, 1024, 24, 16, 4096)
            optimizer = RecordedAdamW(model.parameters())
            for step in range(3):
                tokens, targets = (torch.randint(0, 10_000, (4, context)) for _ in range(2))
                if step == 2:
                    logits = loss = None
                    counter.peak = counter.live
                with torch.autocast("cuda", torch.bfloat16) if autocast else contextlib.nullcontext():
                    logits = model(tokens)
                    loss = cross_entropy(logits, targets)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            found[context] = counter.peak / MIB + absent_gpu.THREADS * 8.125
    return found


if __name__ == "__main__":
    pretend.give_autograd_a_device()
    answers = {name: globals()[name]() for name in sys.argv[1:]}
    print(json.dumps(answers), flush=True)
    os._exit(0)  # the engine's threads still point to what was made here
