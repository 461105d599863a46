"""The private, underscored or undocumented parts of torch that the program uses, each with its reason.

Those that replace a call in the step are in `torch_direct.py`, those of the elastic launcher in `torch_elastic.py`,
those of operators in `torch_operators.py`.

Used on torch 2.11 and 2.13; `tests/test_torch_private.py` tests each of them and fails when torch changes one.
Functions on the hot path are bound rather than wrapped, so that a name here costs nothing there.
"""

import importlib
import operator
import sys
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import SUPPORTED_NODES
from torch.utils.module_tracker import ModuleTracker

# --- tensors and storages

# One kernel for a whole list of tensors. torch.nn.utils.get_total_norm uses them too, but first sorts the gradients by
# device and dtype, which takes 20 microseconds; a loop over tensors launches a kernel for each.
foreach_norm = torch._foreach_norm
foreach_mul_ = torch._foreach_mul_
foreach_copy_ = torch._foreach_copy_
foreach_lerp_ = torch._foreach_lerp_

# storage -> int. The address of a storage's C++ object: equal for tensors that share memory. `data_ptr()` does not
# serve, being 0 for every empty storage and an error for tensors without data.
storage_id = operator.attrgetter("_cdata")

# view -> the tensor that it is a view of; None for others.
base_of = operator.attrgetter("_base")

# tensor -> int. Counts the in-place writes to a tensor, except those of some kernels (BatchNorm's running statistics).
version_of = operator.attrgetter("_version")


# --- modules

# What torch itself keeps in the attributes of every module.
MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))

# The base class of every BatchNorm: 1d, 2d, 3d, synchronised and lazy.
BatchNorm = nn.modules.batchnorm._BatchNorm

# `torch.compile(model)` puts this before every name in the state dict.
COMPILED_PREFIX = "_orig_mod."

# What `get_extra_state` returns is in the state dict under this name.
EXTRA_STATE = nn.modules.module._EXTRA_STATE_KEY_SUFFIX

# module -> dict. The module's own parameters, buffers or submodules by name: the dictionaries that hold them, where
# assigning replaces one. `named_buffers()` and the like only list them, and leave out names whose value is None.
parameters_of: Callable[[nn.Module], dict[str, nn.Parameter | None]] = operator.attrgetter("_parameters")
buffers_of: Callable[[nn.Module], dict[str, Tensor | None]] = operator.attrgetter("_buffers")
registries_of: Callable[[nn.Module], tuple[dict[str, Any], ...]]
registries_of = operator.attrgetter("_parameters", "_buffers", "_modules")


def non_persistent_buffers(module: nn.Module) -> set[str]:
    """The names of the module's own buffers that are not in its state dict. torch has no public way to ask."""
    return module._non_persistent_buffers_set


class KeepsBufferDtypes(nn.Module):
    """A module whose own buffers follow `model.to(...)` to another device, but never to another dtype.

    `_apply` is what `to`, `half`, `cuda` and the like call on every submodule; none of them has a public hook.
    """

    def _apply(self, fn: Any, recurse: bool = True) -> "KeepsBufferDtypes":
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = self._buffers[name]
            if old is not None and new is not None and new.dtype != old.dtype:
                self._buffers[name] = old.to(new.device)
        return self


class ForwardModuleTracker(ModuleTracker):
    """torch's ModuleTracker, except that it ignores forwards that run inside a backward, and keeps nothing in memory.

    Activation checkpointing recomputes blocks there, and the tracker's hooks on the recomputed tensors would keep all
    of them in memory. So would hooks that wait for all gradients of a module, with what a model computes and discards,
    as an early exit does: they hold on to the graph that holds them (torch 2.13, autograd/graph.py). It gets no leaves
    to hook: such a hook fails in a forward that calls `torch.autograd.grad` itself, as a gradient penalty does.
    `_fw_pre_hook` and `_fw_post_hook` are what it registers for every module.
    """

    def _fw_pre_hook(self, module: nn.Module, inputs: Any) -> None:
        if not self.is_bw:
            super()._fw_pre_hook(module, ())
            self._hook(inputs, self._get_pop_fn(self._get_mod_name(module), True))

    def _fw_post_hook(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if not self.is_bw:
            super()._fw_post_hook(module, (), ())
            self._hook(output, self._get_append_fn(self._get_mod_name(module), True))

    def _hook(self, values: Any, function: Callable[..., None]) -> None:
        """Call it when the first of the gradients is there."""
        tensors = [value for value in _pytree.tree_leaves(values) if isinstance(value, Tensor)]
        if tensors := [tensor for tensor in tensors if tensor.requires_grad and not tensor.is_leaf]:
            self._hooks.append(register_multi_grad_hook(tensors, function, mode="any"))


# --- the compiler


def set_activation_memory_budget(fraction: float | None) -> None:
    """The part of the activations, by bytes, that what is compiled from now on keeps for backward; None: torch's own
    choice. Documented, but its module is private; importing it takes as long as the compiler.
    """
    name = "torch._functorch.config"
    if fraction is not None or name in sys.modules:
        config: Any = importlib.import_module(name)
        config.activation_memory_budget = 1.0 if fraction is None else fraction


# --- containers


def pytree_functions(
    kind: type,
) -> tuple[Callable[[Any], tuple[list[Any], Any]], Callable[[list[Any], Any], Any]] | None:
    """`(flatten, unflatten)` of a type that was registered with torch's pytrees, such as TensorDict; else None.

    The table is the only one that says what a registered type holds: torch has no public one.
    """
    node = SUPPORTED_NODES.get(kind)
    return None if node is None else (node.flatten_fn, node.unflatten_fn)


# (function, tree) -> tree, and tree -> list: every leaf of nested containers of all registered types.
tree_map, tree_leaves = _pytree.tree_map, _pytree.tree_leaves


# --- dispatch modes


class DispatchMode(TorchDispatchMode):
    """Base of modes whose `__torch_dispatch__` sees every tensor operation, below autograd.

    The class is documented, but its module is private.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True, torch's default, wraps `__torch_dispatch__` and costs 3 microseconds per operation


# () -> context manager. Operations inside it are not seen by any dispatch mode, such as the counter of live tensors.
outside_dispatch_modes = _disable_current_modes

builds_on_meta = ContextVar("builds_on_meta", default=False)  # for a trace: set by the planner


def fake_tensor_mode() -> Any:
    """A FakeTensorMode: tensors under it have shapes and dtypes, but no memory. Imported on use: it takes 0.1 s.

    Real tensors may take part: generators' states and constants that a model holds on to. A deep copy of a tensor
    stays in the mode: torch's own mode is copied with it (2.13, `Tensor.__deepcopy__`), and every operation on such a
    parameter converts it again, to a second storage of its size. nn.TransformerEncoder copies its layer.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    class Mode(FakeTensorMode):
        def __deepcopy__(self, memo: dict[int, Any]) -> "Mode":
            return self

        def _cached_dispatch_impl(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
            """Without the cache for `set_`: its keys keep the storages that a call was given."""
            has_storage = any(type(arg) is torch.UntypedStorage for arg in args)
            dispatch = self._dispatch_impl if has_storage else super()._cached_dispatch_impl
            return dispatch(func, types, args, kwargs)

    return Mode(allow_non_fake_inputs=True)


def is_fake(tensor: Tensor) -> bool:
    """Whether a `fake_tensor_mode` has made the tensor."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


def strided_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """The tensor itself or, of a sparse one, its indices and values. The public accessors of COO refuse one that is not
    coalesced.
    """
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor,)


def is_tracing() -> bool:
    """Whether a `fake_tensor_mode` is in force, or a model is built for one on meta: tensors have no values."""
    return builds_on_meta.get() or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


# --- the loss scaler


def found_inf(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Per device, the flag that `scaler.unscale_(optimizer)` has just set: 1.0 where a gradient is not finite.

    Shards of a gradient overflow on one rank alone, and GradScaler has no public way to share its verdict.
    """
    return list(scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values())


def forget_unscaling(scaler: torch.amp.GradScaler) -> None:
    """Abandon a step between `unscale_` and `step`: otherwise the next `unscale_` raises. The scale is unchanged."""
    scaler._per_optimizer_states.clear()


# --- DDP


def rebuild_buckets(wrapper: nn.parallel.DistributedDataParallel) -> bool:
    """Rearrange the buckets in the order of the first backward; whether it did. Collective.

    DDP calls this at the start of the next forward, once. Nothing else tells when it has allocated other buckets.
    """
    return wrapper.reducer._rebuild_buckets()


# --- FSDP2


def fsdp_collectives() -> tuple[type, type]:
    """The classes of FSDP2's own all-gather and reduce-scatter.

    `set_custom_all_gather` and `set_custom_reduce_scatter` are public, but what they replace can only be extended.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

    return DefaultAllGather, DefaultReduceScatter


# --- CUDA's record of allocations: documented under "Understanding CUDA Memory Usage", but underscored


def record_memory_history(max_entries: int | None) -> None:
    """Record every allocation with its Python stack, the last `max_entries` of them; None stops recording."""
    started: dict[str, Any] = {"max_entries": max_entries, "context": "alloc", "stacks": "python"}
    torch.cuda.memory._record_memory_history(**{"enabled": None} if max_entries is None else started)


def memory_snapshot(device: torch.device) -> dict[str, Any]:
    """The allocator's segments and its record since `record_memory_history`, as pytorch.org/memory_viz reads them."""
    return torch.cuda.memory._snapshot(device)


# --- TensorBoard


def add_summary(writer: Any, summary: Any, step: int) -> None:
    """Write a whole Summary of `torch.utils.tensorboard.SummaryWriter` as one event.

    The public `add_scalar` queues one event each; the writer's queue holds ten, and beyond it waits for the disk.
    """
    writer._get_file_writer().add_summary(summary, step)


def guard_event_file(writer: Any, failed: Callable[[Exception], None]) -> None:
    """Where a SummaryWriter's file cannot be written, call `failed` once and drop all that follows.

    Otherwise the error ends the writer's thread, which prints a traceback, and every later call raises it.
    """
    records = writer._get_file_writer().event_writer._async_writer._writer
    errors: list[Exception] = []

    def guarded(function: Callable[..., None]) -> Callable[..., None]:
        def attempt(*args: Any) -> None:
            try:
                if not errors:
                    function(*args)
            except Exception as error:  # TensorFlow, where it is installed, raises errors of its own
                errors.append(error)
                failed(error)

        return attempt

    for name in ("write", "flush", "close"):
        setattr(records, name, guarded(getattr(records, name)))


def has_forward_hooks(module: nn.Module) -> bool:
    """Whether anything is called around the module's forward, such as weight normalisation or pruning."""
    return bool(module._forward_pre_hooks or module._forward_hooks)
