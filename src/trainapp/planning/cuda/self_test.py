"""Shows, before any figure, that everything pretended of CUDA is in force: each gap would be a silent error."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from trainapp.memory.live_tensors import LiveTensors
from trainapp.parallel.strategy import local
from trainapp.planning.cuda.allocations import CountedByStream
from trainapp.planning.cuda.devices import Device
from trainapp.planning.cuda.pretend import EngineOnCuda
from trainapp.torch_private import DispatchMode, outside_dispatch_modes


class NotInForce(RuntimeError):
    """Something that must be pretended of CUDA is not, so that no figure would hold."""


class _Seen(DispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.counts[name] = self.counts.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def require(device: Device, engine: EngineOnCuda) -> None:
    """Raises NotInForce with the first one that is not. Call where the trace will run: inside all modes."""
    for name, works in _CHECKS.items():
        try:
            in_force = works(device, engine)
        except Exception as error:
            raise NotInForce(f"{name} is not as on {device.name}: {error}") from error
        if not in_force:
            raise NotInForce(f"{name} is not as on {device.name}")


def _tensor(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = True) -> torch.Tensor:
    return torch.empty(*shape, device="cuda:0", dtype=dtype, requires_grad=grad)


def _backward(device: Device, engine: EngineOnCuda) -> bool:
    weight = _tensor(4, 4)
    (weight @ weight.detach()).sum().backward()
    return weight.grad is not None and weight.grad.device == torch.device("cuda", 0)


def _kernels_of_attention(width: int, dtype: torch.dtype, recompute: bool) -> set[str]:
    q, k, v = (_tensor(1, 2, 16, width, dtype=dtype) for _ in range(3))
    with _Seen() as seen:
        if recompute:
            result = checkpoint(F.scaled_dot_product_attention, q, k, v, use_reentrant=False)
        else:
            result = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        forward = dict(seen.counts)
        result.sum().backward()
    return {
        name if recompute is False or count > forward.get(name, 0) else f"{name}, in the forward alone"
        for name, count in seen.counts.items()
        if name.startswith("_scaled_dot_product") and not name.endswith("_backward")
    }


def _attention(device: Device, engine: EngineOnCuda) -> bool:
    half = "_scaled_dot_product_flash_attention"
    if not device.has_flash_attention:
        half = "_scaled_dot_product_efficient_attention"
    return all(
        _kernels_of_attention(16, dtype, recompute) == {name}
        for recompute in (False, True)
        for dtype, name in ((torch.float16, half), (torch.float32, "_scaled_dot_product_efficient_attention"))
    )


def _autocast(device: Device, engine: EngineOnCuda) -> bool:
    weight = _tensor(4, 4)
    with warnings.catch_warnings(), torch.autocast("cuda", dtype=torch.float16):
        warnings.simplefilter("error")
        product = weight @ weight
        return product.dtype == torch.float16 and F.layer_norm(product, (4,)).dtype == torch.float32


def _scaler(device: Device, engine: EngineOnCuda) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.amp.GradScaler("cuda").is_enabled()


def _foreach(device: Device, engine: EngineOnCuda) -> bool:
    weights = [_tensor(4), _tensor(4)]
    for weight in weights:
        weight.grad = torch.empty_like(weight)
    with _Seen() as seen:
        torch.optim.Adam(weights).step()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
    return seen.counts.get("_foreach_lerp_", 0) == 1 and "_foreach_norm" in seen.counts


def _accumulation(device: Device, engine: EngineOnCuda) -> bool:
    start, before = _tensor(8), engine.added
    middle = start * 2
    with LiveTensors(devices=("cuda",)):  # a trace has such a mode above the engine's
        (middle.sin() + middle.cos()).sum().backward()
    return engine.added == before + 1


def _streams(device: Device, engine: EngineOnCuda) -> bool:
    side: Any = torch.cuda.Stream()
    with CountedByStream() as counter:
        before = _tensor(4)
        with torch.cuda.stream(side):
            beside = _tensor(4)
        after = _tensor(4)
        del before, beside, after
    return list(counter.streams.values()) == [side.number]


def _shards(device: Device, engine: EngineOnCuda) -> bool:
    """Gathered and reduced on two streams next to the computation's, and updated with foreach kernels."""
    if not dist.is_initialized():
        return True
    from torch.distributed.fsdp import fully_shard

    world = dist.get_world_size()
    with outside_dispatch_modes():
        mesh = init_device_mesh("cuda", (world,))
    layer = nn.Linear(4, world, bias=False, device="cuda:0")
    fully_shard(layer, mesh=mesh)
    with CountedByStream() as counter:
        layer(_tensor(2, 4)).sum().backward()
    with _Seen() as seen:
        torch.optim.Adam(layer.parameters()).step()
    gradient = layer.weight.grad
    is_reduced = gradient is not None and local(gradient).shape == (1, 4)
    return is_reduced and len({0, *counter.streams.values()}) == 3 and seen.counts.get("_foreach_lerp_", 0) > 0


_CHECKS: dict[str, Callable[[Device, EngineOnCuda], bool]] = {
    "the backward": _backward,
    "the choice of attention kernels": _attention,
    "autocast": _autocast,
    "the loss scaler": _scaler,
    "the use of foreach kernels": _foreach,
    "the adding up of gradients": _accumulation,
    "the allocation on streams": _streams,
    "the sharding of parameters": _shards,
}
