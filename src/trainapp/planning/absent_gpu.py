"""A CUDA device that this machine does not have: its name in `plan.device`, and what a plan for it counts."""

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

from trainapp.config.schema import Config
from trainapp.errors import UserError
from trainapp.memory.cuda import without_headroom
from trainapp.memory.live_tensors import Category
from trainapp.planning import cuda_kernels, pretend
from trainapp.planning.recorder import Breakdown
from trainapp.planning.simulated_ranks import planned_world_size
from trainapp.training.engine import Engine
from trainapp.units import bytes_text, parse_memory_size

KIB = 2**10
MIB = 2**20
# name: MiB that torch reports as `total_memory`, and compute capability. Reports differ by up to some hundred MiB
# between drivers and boards: the lowest published one, or an assumption below it.
DEVICES = {
    "t4-16gb": (15_079, (7, 5)),
    "v100-16gb": (16_130, (7, 0)),
    "v100-32gb": (32_494, (7, 0)),
    "a10-24gb": (22_515, (8, 6)),
    "a100-40gb": (40_326, (8, 0)),
    "a100-80gb": (81_038, (8, 0)),
    "rtx3090-24gb": (24_113, (8, 6)),
    "l4-24gb": (22_478, (8, 9)),
    "l40s-48gb": (45_495, (8, 9)),
    "rtx4090-24gb": (24_091, (8, 9)),
    "h100-80gb": (81_008, (9, 0)),
    "h200-141gb": (143_156, (9, 0)),
}
CONTEXT = 512 * MIB  # the driver's and libraries' code, which no allocator counts
# NCCL's memory on A100s with NVLink (NVIDIA/nccl#964), per group of ranks: all, shards, replicas.
COMMUNICATOR = 688 * MIB
THREADS = 2  # with a cuBLAS workspace each: the program's and the autograd engine's
_CONVOLUTIONS = (
    "convolutions: cuDNN chooses its algorithms on the device, and their workspaces are not included; plan with a "
    "smaller memory.limit to leave room for them"
)


@dataclass(frozen=True)
class AbsentGpu:
    """The GPU that a plan is for. Its plan is in allocated bytes.

    Attributes:
        name: as in `plan.device`.
        memory: in bytes.
        capability: its compute capability.
        on_cpu: traced on CPU tensors with CUDA's rules, if CUDA tensors cannot be faked.
        margin: the relative error of a peak. As much stays free for the allocator's cache, which was 1.04 to 1.29
            times the live memory in public records.
    """

    name: str
    memory: int
    capability: tuple[int, int]
    on_cpu: bool = False
    margin: float = 0.1

    @property
    def device(self) -> torch.device:
        """The device of the trace's tensors."""
        return torch.device("cpu") if self.on_cpu else torch.device("cuda", 0)

    def limit(self, config: Config) -> int:
        """Return the bytes that a run on the device may reserve; without `memory.limit`, those of an unused device."""
        if config.memory.limit is not None:
            return parse_memory_size(config.memory.limit, self.memory)
        available = self.memory - CONTEXT
        if planned_world_size(config) > 1:
            available -= _process_groups(config) * COMMUNICATOR
        return without_headroom(available)

    @contextlib.contextmanager
    def pretended(self) -> Iterator[None]:
        """Make code in the block see this GPU and keep what its kernels keep. Enter before the fake tensor mode."""
        with contextlib.ExitStack() as stack:
            for patch in cuda_kernels.patches(self.capability, self.device.type):
                stack.enter_context(patch)
            if not self.on_cpu:
                stack.enter_context(pretend.visible(self.name, self.capability, self.memory))
            yield

    def prepare(self, engine: Engine) -> None:
        """Prepare an engine. Raises NotImplementedError for a model whose kernels are known only on a GPU."""
        is_recurrent = any(isinstance(module, nn.RNNBase) for module in engine.state.model.modules())
        if is_recurrent and not self.on_cpu:
            raise NotImplementedError("what cuDNN keeps for a recurrent layer is known only on a GPU")
        engine.nonfinite.check = lambda: None  # type: ignore[method-assign]  # reads when a step is logged

    def with_untraced_memory(self, breakdown: Breakdown, engine: Engine, config: Config) -> Breakdown:
        """Return a trace's breakdown with what no trace shows: cuBLAS's workspaces, the whole model before FSDP shards
        it, and a note on convolutions.
        """
        model = engine.state.model
        breakdown = self._with_libraries(breakdown, config)
        has_convolutions = any(isinstance(module, nn.modules.conv._ConvNd) for module in model.modules())
        if has_convolutions:
            breakdown = replace(breakdown, notes=(*breakdown.notes, _CONVOLUTIONS))
        is_sharded = config.parallel.strategy == "fsdp" and engine.ranks.world_size > 1
        if is_sharded and not config.parallel.fsdp.meta_init:
            breakdown = _with_building(breakdown, model)
        return breakdown

    def _with_libraries(self, breakdown: Breakdown, config: Config) -> Breakdown:
        """Add cuBLAS's workspaces, which stay from the first matmul on (an excerpt of CublasHandlePool.cpp)."""
        is_hopper_or_blackwell = self.capability[0] in (9, 10, 12)
        workspace = 8320 * KIB
        if is_hopper_or_blackwell or config.train.deterministic:
            workspace = 32 * MIB
        return breakdown.with_constant("libraries", THREADS * workspace)


def _process_groups(config: Config) -> int:
    """Return the number of NCCL's groups that a rank belongs to."""
    parallel = config.parallel
    if parallel.strategy == "single":
        return 0
    if parallel.strategy == "ddp":
        return 1
    return 2 if parallel.fsdp.replicas == 1 else 3


def _with_building(breakdown: Breakdown, model: nn.Module) -> Breakdown:
    """Add the phase before sharding, in which each FSDP rank has the whole fp32 model."""
    model_bytes = 0
    for parameter in model.parameters():  # a DTensor's `numel` is that of all ranks together
        model_bytes += parameter.numel() * max(4, parameter.dtype.itemsize)
    breakdown = replace(breakdown, phases={"building": model_bytes} | breakdown.phases)
    if model_bytes <= breakdown.total:
        return breakdown

    # It is the peak: what the trace tells of another moment does not apply to it.
    note = (
        f"each rank has the whole model on its device, {bytes_text(model_bytes)}, before it is sharded; "
        "parallel.fsdp.meta_init=true builds only the shards"
    )
    return replace(
        breakdown,
        total=model_bytes,
        phase="building",
        module="",
        categories={Category.PARAMETERS.value: model_bytes},
        events=[],
        notes=(*breakdown.notes, note),
    )


# --- which device


def find(config: Config) -> AbsentGpu:
    """Return the GPU named by `plan.device`: one of DEVICES, or a memory and compute capability, such as `24GiB@8.9`.

    Raises UserError for any other name, for impossible values, and for settings that contradict it.
    """
    name = str(config.plan.device)
    if config.train.device not in ("auto", "cuda"):
        raise UserError(
            f"plan.device={name} with train.device={config.train.device}: the plan would be for CUDA; use "
            "train.device=auto"
        )
    if name in DEVICES:
        mebibytes, capability = DEVICES[name]
        gpu = AbsentGpu(name, mebibytes * MIB, capability)
    else:
        gpu = _parse_gpu(name)
    if gpu.limit(config) > gpu.memory:
        raise UserError(
            f"memory.limit={config.memory.limit}: plan.device={name} has {bytes_text(gpu.memory)}; use less, or a "
            "fraction"
        )
    return gpu


def _parse_gpu(name: str) -> AbsentGpu:
    """Return the GPU of a memory and a compute capability. Raises UserError for any other name."""
    size, _, capability = name.partition("@")
    version = re.fullmatch(r"(\d+)\.(\d)", capability)
    memory = 0
    with contextlib.suppress(ValueError):
        memory = parse_memory_size(size, 0)  # a fraction is one of no memory: refused, too
    if not version or not memory:
        raise UserError(
            f"plan.device={name}: unknown; known devices are {', '.join(DEVICES)}. Name others by memory and "
            "compute capability, such as plan.device=24GiB@8.9"
        )
    return AbsentGpu(name, memory, (int(version[1]), int(version[2])))


def device_spec(device: torch.device) -> str:
    """Return the name of this machine's device in `plan.device`."""
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.total_memory}@{properties.major}.{properties.minor}"


def with_device_spec(config: Config, device: torch.device) -> Config:
    """Return the configuration to plan for this machine's GPU in a process that does not see it."""
    plan_settings = replace(config.plan, device=device_spec(device), world=planned_world_size(config))
    return replace(config, plan=plan_settings, train=replace(config.train, device="auto"))


def with_data_on_cpu(config: Config) -> Config:
    """Return the configuration with its data and numerics opened on the CPU."""
    return replace(config, train=replace(config.train, device="cpu"))
