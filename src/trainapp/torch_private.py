"""The private, underscored or undocumented parts of torch that the program uses, each with its reason.

Used on torch 2.11 and 2.13; `tests/test_torch_private.py` tests each of them and fails when torch changes one.
Functions on the hot path are bound rather than wrapped, so a name here costs nothing there. Slow imports happen on use.
"""

import contextlib
import functools
import importlib
import operator
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.autograd import profiler
from torch.autograd.graph import _engine_run_backward, register_multi_grad_hook
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import SUPPORTED_NODES
from torch.utils.data._utils import worker
from torch.utils.module_tracker import ModuleTracker

# --- tensors and storages

# One kernel for a whole list of tensors. torch.nn.utils.get_total_norm uses them too, but first sorts the gradients by
# device and dtype, which takes 20 microseconds; a loop over tensors launches a kernel for each.
foreach_norm = torch._foreach_norm
foreach_mul_ = torch._foreach_mul_
foreach_copy_ = torch._foreach_copy_

# storage -> int. The address of a storage's C++ object: equal for tensors that share memory. `data_ptr()` is
# unsuitable: 0 for every empty storage and an error for tensors without data.
storage_id = operator.attrgetter("_cdata")

# view -> its base tensor; None for others.
base_of = operator.attrgetter("_base")

# tensor -> int. Counts the in-place writes to a tensor, except those of some kernels (BatchNorm's running statistics).
version_of = operator.attrgetter("_version")


# () -> int. The number of the backward pass that this thread works on; -1 outside of one.
graph_task: Callable[[], int] = torch._C._current_graph_task_id


# --- modules

# The attributes that torch itself sets on every module.
MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))

# The attributes that every optimizer has, and one that torch's schedulers add. What is in them, a state dict has.
OPTIMIZER_ATTRIBUTES = frozenset({*vars(torch.optim.SGD([torch.zeros(1)], lr=0.0)), "_opt_called", "_step_count"})

# (tensor, value) -> None. What `tensor.data = value` calls, as a TorchFunctionMode sees it; compare by `==`.
SET_DATA: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]

# The base class of every BatchNorm: 1d, 2d, 3d, synchronised and lazy.
BatchNorm = nn.modules.batchnorm._BatchNorm

# `torch.compile(model)` puts this before every name in the state dict.
COMPILED_PREFIX = "_orig_mod."

# The result of `get_extra_state` is in the state dict under this name.
EXTRA_STATE = nn.modules.module._EXTRA_STATE_KEY_SUFFIX

# module -> dicts. The module's own parameters, buffers and submodules by name: the dictionaries that hold them, in
# which assignment replaces one. `named_buffers()` etc. only list them, and omit names whose value is None.
registries_of: Callable[[nn.Module], tuple[dict[str, Any], ...]]
registries_of = operator.attrgetter("_parameters", "_buffers", "_modules")

# module -> set[str]. The names of the module's own buffers that are not in its state dict.
non_persistent_buffers: Callable[[nn.Module], set[str]] = operator.attrgetter("_non_persistent_buffers_set")


def has_forward_hooks(module: nn.Module) -> bool:
    """Return whether hooks run around the module's forward, such as weight normalisation or pruning."""
    return bool(module._forward_pre_hooks or module._forward_hooks)


class ForwardModuleTracker(ModuleTracker):
    """torch's ModuleTracker, except that it ignores forwards inside a backward, and keeps nothing in memory.

    Activation checkpointing recomputes blocks there, and the tracker's hooks on the recomputed tensors would keep all
    of them in memory. So would hooks that wait for all gradients of a module, for results that a model computes and
    discards, as with an early exit: hooks and graph keep each other alive (torch 2.13, autograd/graph.py). Leaves are
    not hooked: such a hook fails in a forward that calls `torch.autograd.grad` itself, as for a gradient penalty.
    `_fw_pre_hook` and `_fw_post_hook` are registered for every module.
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
        """Call the function when the first of the gradients is computed."""
        tensors = []
        for value in _pytree.tree_leaves(values):
            if isinstance(value, Tensor) and value.requires_grad and not value.is_leaf:
                tensors.append(value)
        if tensors:
            self._hooks.append(register_multi_grad_hook(tensors, function, mode="any"))


# --- hooks on the gradients of parameters


def has_accumulation_hooks(parameter: Tensor) -> bool:
    """Return whether hooks of `register_post_accumulate_grad_hook` are on the parameter."""
    return bool(parameter._post_accumulate_grad_hooks)


def copy_gradient_hooks(original: Tensor, copy: Tensor) -> None:
    """Give the copy of a parameter its hooks, which `copy.deepcopy` leaves out. One that is frozen takes none."""
    if not copy.requires_grad:
        return
    for hook in (original._backward_hooks or {}).values():
        copy.register_hook(hook)
    for hook in (original._post_accumulate_grad_hooks or {}).values():
        copy.register_post_accumulate_grad_hook(hook)


# --- the compiler


def set_activation_memory_budget(fraction: float | None) -> None:
    """Set the fraction of activations, by bytes, that functions compiled from now on keep for backward; None: torch's
    own choice. Documented, but its module is private; importing it takes as long as the compiler.
    """
    name = "torch._functorch.config"
    if fraction is not None or name in sys.modules:
        config: Any = importlib.import_module(name)
        config.activation_memory_budget = 1.0 if fraction is None else fraction


# --- containers


# type -> its `flatten_fn` and `unflatten_fn` if registered with torch's pytrees, as TensorDict is; otherwise None.
# torch has no public API for a registered type's contents.
registered_container = SUPPORTED_NODES.get

# (function, tree) -> tree: every leaf of nested containers of all registered types.
tree_map = _pytree.tree_map


# --- backward and the optimizer's step, without torch's Python code around them

# In a step of 1.6 ms on a CPU that code takes 0.15 ms, nearly a tenth (docs/benchmarks.md): 14 calls around each
# backward, and a profiler record around the optimizer's step. Any unusual case uses the documented path.

# The code objects shared by every wrapped `step`, outside and inside. One that is wrapped again or replaced has others.
_WRAPPER = Optimizer.profile_hook_step(lambda: None).__code__
_WITHOUT_GRADIENTS = torch_optimizer._use_grad_for_differentiable(lambda: None).__code__

with torch.inference_mode(False), torch.enable_grad():  # independent of the modes at import
    _LEAF = torch.zeros((), device="cpu", requires_grad=True)
    _FIRST = _LEAF.clone()  # created before all other nodes, so the engine processes it last


def backward(loss: Tensor, gradient: Tensor) -> None:
    """Do `loss.backward(gradient)` for scalars."""
    if type(loss) is Tensor and type(gradient) is Tensor and loss.dtype is gradient.dtype and not loss.ndim:
        _engine_run_backward((loss,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True)
    else:
        loss.backward(gradient)


def release_failed_backward() -> None:
    """Free what a failed backward in this thread had saved.

    Its nodes stay in the thread's queue, with their saved tensors, until the next backward (torch 2.13,
    autograd/engine.cpp, `thread_main` and `local_ready_queue`): a retried forward would lack that memory.
    """
    with outside_dispatch_modes():
        torch.autograd.grad(_FIRST, _LEAF, retain_graph=True)


def step_optimizer(optimizer: Optimizer) -> None:
    """Do `optimizer.step()`, without a profiler record if no profiler is active and no hooks are registered."""
    # A `step` that is torch's wrapper around a method, and nothing that wants to see the step.
    method: Any = getattr(type(optimizer), "step", None)
    is_usual = getattr(method, "__code__", None) is _WRAPPER and "step" not in vars(optimizer)
    if not is_usual or _is_observed(optimizer):
        optimizer.step()
    elif method.__wrapped__.__code__ is _WITHOUT_GRADIENTS and not optimizer.defaults["differentiable"]:
        with torch.no_grad():
            method.__wrapped__.__wrapped__(optimizer)
    else:
        method.__wrapped__(optimizer)


def _is_observed(optimizer: Optimizer) -> bool:
    return bool(
        profiler._is_profiler_enabled
        or optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or torch_optimizer._global_optimizer_pre_hooks
        or torch_optimizer._global_optimizer_post_hooks
    )


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


def draw_as_uncompiled(on: bool) -> None:
    """Set whether compiled functions draw random numbers by the kernels that are called without compilation, in the
    same order, instead of by inductor's own. Imports inductor.
    """
    from torch._inductor import config

    config.fallback_random = on


def fake_tensor_mode() -> Any:
    """Return a FakeTensorMode: tensors under it have shapes and dtypes, but no memory. Imported on use: it takes 0.1 s.

    Real tensors are allowed: generators' states and constants of a model. A deep copy of a tensor stays in the same
    mode: torch would copy the mode too (2.13, `Tensor.__deepcopy__`), and every operation on such a parameter would
    convert it again, to a second storage of its size. nn.TransformerEncoder copies its layer.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    class Mode(FakeTensorMode):
        def __deepcopy__(self, memo: dict[int, Any]) -> "Mode":
            return self

        def _cached_dispatch_impl(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
            """Without the cache for `set_`: its keys keep the storages of a call alive."""
            has_storage = any(type(arg) is torch.UntypedStorage for arg in args)
            dispatch = self._dispatch_impl if has_storage else super()._cached_dispatch_impl
            return dispatch(func, types, args, kwargs)

    return Mode(allow_non_fake_inputs=True)


def convertible_fakes() -> contextlib.AbstractContextManager[Any]:
    """Inside the block, a module with fake parameters can convert itself (`self.half()`). `Module._apply` swaps fake
    parameters, which `swap_tensors` refuses for tensors with weak references: torch's own, after `uniform_` (2.13).
    """
    return mock.patch.object(torch.utils, "weakref", types.SimpleNamespace(getweakrefs=lambda tensor: []))


def is_fake(tensor: Tensor) -> bool:
    """Return whether the tensor was made by a `fake_tensor_mode`."""
    module = sys.modules.get("torch._subclasses.fake_tensor")
    return module is not None and isinstance(tensor, module.FakeTensor)


def has_values(tensor: Tensor) -> bool:
    """Return whether a tensor can be read: not on the meta device or from a `fake_tensor_mode`."""
    return not (tensor.is_meta or is_fake(tensor))


def strided_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the tensor itself or, if it is sparse, its indices and values. The public accessors of COO tensors require
    a coalesced one.
    """
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor,)


# --- operators

# What `tensor.item()` and `bool(tensor)` dispatch to.
READ_OPERATORS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.item.default)

# tensor -> device. C++ calls this to get the device of tensors without data (2.13, TensorImpl::device_custom): several
# times per operation, and through every mode. `tensor.device` gives the same answer at once.
ASKS_DEVICE = torch.ops.prim.device.default

# operator -> bool. Whether its result is a view of its first argument or, in inference mode, may be one: there, modes
# see `reshape` and `contiguous` themselves. An undocumented attribute of OpOverload.
may_view = operator.attrgetter("is_view")

# `torch.tensor(data)` dispatches to this, with the tensor that it has just made.
LIFT = torch.ops.aten.lift_fresh.default

# Attention kernels whose results selective activation checkpointing keeps. Every backend has its own operator.
ATTENTION_OPERATORS = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
)

# (int8 [M, K], int8 [K, N]) -> int32 [M, N]. torch's only int8 matmul on the CPU.
int8_product = torch._int_mm

# (tensor, shape) -> the same memory in another shape, which autograd treats as a separate tensor: nn.Linear returns
# one. A view returned by a custom autograd function must not be changed in place.
unsafe_view = torch.ops.aten._unsafe_view.default

# Fused optimizers that write in place and return nothing. Torch has no meta kernel for them (2.13): fake tensors run
# them for real, on zeros of the size of the parameters.
FUSED_WITHOUT_META = frozenset({torch.ops.aten._fused_sgd_, torch.ops.aten._fused_adagrad_})


def draws_numbers(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether this call draws random numbers. Attention and recurrent layers have the tag of dropout at every
    rate.
    """
    if torch.Tag.nondeterministic_seeded not in operation.tags:
        return False

    # Its rate of dropout, if it has one: by position, by name, or the default.
    rate = _dropout_argument(operation)
    if rate is None:
        return True
    position, name, default = rate
    if position < len(args):
        return bool(args[position])
    return bool(kwargs.get(name, default))


@functools.cache
def _dropout_argument(operation: Any) -> tuple[int, str, Any] | None:
    """Return position, name and default of an operation's rate of dropout. Reading a schema takes 10 microseconds."""
    for position, argument in enumerate(operation._schema.arguments):
        if argument.name in ("dropout", "dropout_p"):
            return position, argument.name, argument.default_value
    return None


# --- the loss scaler


def found_inf(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return, per device, the flag that `scaler.unscale_(optimizer)` has just set: 1.0 if a gradient is not finite.

    Shards of a gradient may overflow on only one rank, and GradScaler has no public way to share its flag.
    """
    optimizer_state = scaler._per_optimizer_states[id(optimizer)]
    return list(optimizer_state["found_inf_per_device"].values())


def forget_unscaling(scaler: torch.amp.GradScaler) -> None:
    """Abandon a step between `unscale_` and `step`: otherwise the next `unscale_` raises. The scale is unchanged."""
    scaler._per_optimizer_states.clear()


# --- DDP


def rebuild_buckets(wrapper: nn.parallel.DistributedDataParallel) -> bool:
    """Rearrange the buckets in the order of the first backward. Return whether it did. Collective.

    DDP calls this once, at the start of the next forward. Nothing else reveals when it has allocated new buckets.
    """
    return wrapper.reducer._rebuild_buckets()


# --- FSDP2

# DTensor -> this rank's part, not a view. `to_local()` makes a view in every call, even if no gradient is recorded
# (2.13, distributed/tensor/_api.py), which took a fifth of a trace of many shards.
local_part = operator.attrgetter("_local_tensor")


def is_shard(tensor: Any) -> bool:
    """Return whether the tensor is a shard of this rank, a DTensor."""
    return hasattr(tensor, "device_mesh")


def local(tensor: Any) -> Tensor:
    """Return the part of the tensor in this rank's memory, not a view: gradients do not flow through it to a shard."""
    return local_part(tensor) if is_shard(tensor) else tensor


def sharded_muon_updates() -> Any:
    """Around steps of torch's Muon: shard the update of a shard as its gradient. It is replicated, and DTensor does not
    add that in place to a matrix with fewer rows than ranks, such as a gate's [1, N] (2.13).
    """
    orthogonal = torch.optim._muon._zeropower_via_newtonschulz

    def sharded(gradient: Any, *settings: Any) -> Any:
        update: Any = orthogonal(gradient, *settings)
        if not is_shard(gradient):
            return update
        return update.redistribute(placements=gradient.placements)

    return mock.patch.object(torch.optim._muon, orthogonal.__name__, sharded)


def prepare_fsdp(root: Any) -> None:
    """Initialise FSDP2 now, as the first forward of its root module, an FSDPModule, would otherwise do.

    This decides in which dtype the gradients of each block are reduced, by its parameters that require gradients at
    that moment (torch 2.13, fsdp/_fully_shard/_fsdp_param_group.py, `_init_mp_dtypes`).
    """
    root._get_fsdp_state()._lazy_init()


def clear_gathered_gradients(root: Any) -> None:
    """Clear what FSDP2 has accumulated in gathered parameters, in micro-batches whose gradients are not reduced.

    `reset_iter_state` is documented to discard it, and does not (torch 2.13).
    """
    for parameter in _fsdp_parameters(root):
        parameter.unsharded_accumulated_grad = None
        if hasattr(parameter, "_unsharded_param"):  # from its first all-gather on
            parameter._unsharded_param.grad = None


def written_gathered_parameters(root: Any) -> list[str]:
    """Return the names of parameters whose gathered copies were written: the shards do not change. FSDP2 gathers
    without a new version (torch 2.13). Takes about a microsecond for each.
    """
    names = []
    for parameter in _fsdp_parameters(root):
        gathered = getattr(parameter, "_unsharded_param", None)  # from its first all-gather on
        if gathered is not None and gathered._version > 0:
            names.append(parameter._param_fqn)
    return names


def has_gathered_gradients(root: Any) -> bool:
    """Return whether gathered parameters hold gradients that FSDP2 has not reduced into the shards."""
    for parameter in _fsdp_parameters(root):
        gathered = getattr(parameter, "_unsharded_param", None)  # from its first all-gather on
        if parameter.unsharded_accumulated_grad is not None or (gathered is not None and gathered.grad is not None):
            return True
    return False


def is_in_forward(root: Any) -> bool:
    """Return whether FSDP2 is in the forward of its root module. The end of any backward inside that forward ends it
    (torch 2.13, fsdp/_fully_shard/_fsdp_state.py, `_root_post_backward_final_callback`).
    """
    return root._get_fsdp_state()._training_state.name == "FORWARD"


def _fsdp_parameters(root: Any) -> Iterator[Any]:
    """Yield FSDP2's own records of the parameters that it shards."""
    for state in root._get_fsdp_state()._state_ctx.all_states:
        for group in state._fsdp_param_groups:
            yield from group.fsdp_params


def fsdp_collectives() -> tuple[type, type]:
    """Return the classes of FSDP2's own all-gather and reduce-scatter.

    `set_custom_all_gather` and `set_custom_reduce_scatter` are public, but the originals must be subclassed.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

    return DefaultAllGather, DefaultReduceScatter


# --- CUDA's record of allocations: documented under "Understanding CUDA Memory Usage", but underscored


def record_memory_history(max_entries: int | None) -> None:
    """Record allocations with their Python stacks, the last `max_entries` of them; None stops recording."""
    options: dict[str, Any] = {"enabled": None}
    if max_entries is not None:
        options = {"max_entries": max_entries, "context": "alloc", "stacks": "python"}
    torch.cuda.memory._record_memory_history(**options)


def memory_snapshot(device: torch.device) -> dict[str, Any]:
    """Return the allocator's segments and its record since `record_memory_history`, as pytorch.org/memory_viz reads
    them.
    """
    return torch.cuda.memory._snapshot(device)


# --- workers of the data loader


def become_main_process() -> None:
    """Make `get_worker_info` return None from now on, as in the main process.

    A stream that sees a worker reads only a part of its data; Hugging Face's also shuffles differently in one worker
    than without. The program has already divided the stream, and its order must not depend on processes.
    """
    worker._worker_info = None


# --- restarts by torch's elastic launcher


class Restart(Enum):
    """Whether failed workers are restarted."""

    REFUSED = "refused"
    COUNTED = "counted"  # if fewer than `max_restarts` were counted so far
    FREE = "free"  # regardless of `max_restarts`


@contextlib.contextmanager
def asked_before_restarts(decide: Callable[[], Restart]) -> Iterator[None]:
    """Inside the block, the launcher asks `decide` before it restarts failed workers; on its own it only counts them.

    decide: called once per failure of a worker.
    """
    api: Any = importlib.import_module("torch.distributed.launcher.api")  # late: one process does not need it
    standard = api.LocalElasticAgent

    class Agent(standard):  # type: ignore[misc, valid-type]
        def _monitor_workers(self, worker_group: Any) -> Any:
            result = super()._monitor_workers(worker_group)
            if result.is_failed():
                # The launcher restarts the workers if restarts remain, and counts down.
                decision = decide()
                if decision is Restart.REFUSED:
                    self._remaining_restarts = 0
                elif decision is Restart.FREE:
                    # Raise both: their difference is the workers' TORCHELASTIC_RESTART_COUNT.
                    worker_group.spec.max_restarts += 1
                    self._remaining_restarts += 1
            return result

    with mock.patch.object(api, "LocalElasticAgent", Agent):
        yield
