"""One test of each private part of torch that the program uses: it fails when torch changes that part."""

import ast
import contextlib
import copy
import gc
import inspect
import subprocess
import sys
import types
import weakref
from pathlib import Path

import pytest
import torch
from recorded_operations import RecordedOperations
from torch import nn
from torch.utils.checkpoint import checkpoint

from trainapp import torch_private
from trainapp.memory.live_tensors import LiveTensors
from trainapp.torch_elastic import Restart, asked_before_restarts
from trainapp.torch_operators import (
    ASKS_DEVICE,
    ATTENTION_OPERATORS,
    FLOP_FORMULAS,
    FUSED_WITHOUT_META,
    READ_OPERATORS,
    UNIQUE,
    int8_product,
    schema_of,
    unsafe_view,
    written_arguments,
)
from trainapp.torch_private import (
    COMPILED_PREFIX,
    EXTRA_STATE,
    BatchNorm,
    DispatchMode,
    ForwardModuleTracker,
    KeepsBufferDtypes,
    add_summary,
    base_of,
    buffers_of,
    fake_tensor_mode,
    foreach_copy_,
    foreach_lerp_,
    foreach_mul_,
    foreach_norm,
    forget_unscaling,
    found_inf,
    fsdp_collectives,
    guard_event_file,
    has_forward_hooks,
    is_fake,
    is_tracing,
    memory_snapshot,
    non_persistent_buffers,
    outside_dispatch_modes,
    parameters_of,
    pytree_functions,
    rebuild_buckets,
    record_memory_history,
    registries_of,
    storage_id,
    strided_parts,
    tree_leaves,
    tree_map,
    version_of,
)
from trainapp.torch_workers import become_main_process, is_loader_worker


class Seen(DispatchMode):
    """Records the name of every operation."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_a_registered_container_is_opened_and_rebuilt():
    class Pair:
        def __init__(self, first, second):
            self.first, self.second = first, second

    assert pytree_functions(Pair) is None
    torch.utils._pytree.register_pytree_node(
        Pair, lambda pair: ([pair.first, pair.second], "context"), lambda values, context: Pair(*values)
    )
    flatten, unflatten = pytree_functions(Pair)
    values, context = flatten(Pair(1, 2))
    assert (list(values), context) == ([1, 2], "context")
    assert unflatten([3, 4], context).second == 4


def test_reads_of_values_are_these_operations():
    with RecordedOperations() as reads:
        torch.ones(()).item()
        bool(torch.ones(()) > 0)
        float(torch.ones(()))
    assert sum(func in READ_OPERATORS for func in reads.seen) == 3


def test_foreach_kernels():
    tensors = [torch.tensor([3.0, 4.0]), torch.full((2, 2), 1.0)]
    assert [float(norm) for norm in foreach_norm(tensors)] == [5.0, 2.0]
    foreach_mul_(tensors, torch.tensor(2.0))
    assert tensors[0].tolist() == [6.0, 8.0]
    copies = [torch.zeros(2), torch.zeros(2, 2)]
    foreach_copy_(copies, tensors)
    assert torch.equal(copies[1], tensors[1])
    foreach_lerp_(copies, [torch.zeros(2), torch.zeros(2, 2)], 0.5)
    assert copies[0].tolist() == [3.0, 4.0]


def test_foreach_kernels_are_one_operation():
    with Seen() as seen:
        foreach_norm([torch.ones(2), torch.ones(3)])
    assert seen.names.count("_foreach_norm") == 1


def test_storage_id_is_of_the_storage():
    tensor, other = torch.zeros(4), torch.zeros(4)
    assert storage_id(tensor.untyped_storage()) == storage_id(tensor[2:].untyped_storage())
    assert storage_id(tensor.untyped_storage()) != storage_id(other.untyped_storage())
    empty = [torch.zeros(0), torch.zeros(0)]  # both have the same (null) data address
    assert len({storage_id(t.untyped_storage()) for t in empty}) == 2
    assert len({t.data_ptr() for t in empty}) == 1


def test_version_counts_writes():
    tensor = torch.zeros(3)
    before = version_of(tensor)
    tensor + 1
    assert version_of(tensor) == before
    tensor.add_(1)
    assert version_of(tensor) > before


def test_version_does_not_count_batchnorms_writes():
    """Why the version alone does not show that a buffer of the state is unchanged."""
    norm = nn.BatchNorm1d(2)
    mean, before = norm.running_mean.clone(), version_of(norm.running_mean)
    norm(torch.randn(4, 2))
    assert not torch.equal(norm.running_mean, mean)
    assert version_of(norm.running_mean) == before


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.LazyBatchNorm1d])
def test_every_batchnorm_is_one(kind):
    assert issubclass(kind, BatchNorm)
    assert not issubclass(nn.LayerNorm, BatchNorm)
    assert not issubclass(nn.GroupNorm, BatchNorm)


def test_the_prefix_of_a_compiled_model():
    compiled = torch.compile(nn.Linear(1, 1, bias=False))
    assert list(compiled.state_dict()) == [f"{COMPILED_PREFIX}weight"]


def test_the_name_of_extra_state():
    class Counter(nn.Module):
        def get_extra_state(self):
            return 3

    assert nn.Sequential(Counter()).state_dict() == {f"0.{EXTRA_STATE}": 3}


def module_with_buffers(kind=nn.Module):
    module = kind()
    module.register_buffer("state", torch.ones(2))
    module.register_buffer("table", torch.ones(2), persistent=False)
    module.register_buffer("none", None)
    return module


def test_buffers_of_is_the_modules_dictionary():
    module = module_with_buffers()
    assert list(buffers_of(module)) == ["state", "table", "none"]
    replacement = torch.zeros(2)
    buffers_of(module)["state"] = replacement
    assert module.state is replacement


def test_registries_of_are_the_modules_dictionaries():
    module = module_with_buffers()
    module.register_parameter("scale", None)
    module.inner = nn.Linear(1, 1)
    parameters, buffers, modules = registries_of(module)
    assert (list(parameters), list(buffers), list(modules)) == (["scale"], ["state", "table", "none"], ["inner"])
    parameters["scale"] = replacement = nn.Parameter(torch.zeros(2))
    del buffers["table"]
    modules["inner"] = None
    assert module.scale is replacement
    assert module.inner is None
    assert not hasattr(module, "table")


def test_parameters_of_is_the_modules_dictionary():
    module = nn.Linear(2, 2, bias=False)
    assert list(parameters_of(module)) == ["weight", "bias"]
    replacement = nn.Parameter(torch.zeros(2, 2))
    parameters_of(module)["weight"] = replacement
    assert module.weight is replacement


def test_non_persistent_buffers():
    module = module_with_buffers()
    assert non_persistent_buffers(module) == {"table"}
    assert list(module.state_dict()) == ["state"]


@pytest.mark.parametrize("convert", [lambda m: m.to(torch.bfloat16), lambda m: m.half(), lambda m: m.double()])
def test_buffers_keep_their_dtype(convert):
    module = module_with_buffers(KeepsBufferDtypes)
    module.table.mul_(1 + 2**-20)  # a value that no conversion to another dtype and back preserves
    table, model = module.table.clone(), nn.Sequential(module, nn.Linear(1, 1))
    convert(model)
    assert model[1].weight.dtype != torch.float32
    assert (module.state.dtype, module.table.dtype) == (torch.float32, torch.float32)
    assert torch.equal(module.table, table)
    assert model.to("meta")[0].table.device.type == "meta"


def tracked(tracker_class):
    """Whether each hook of the tracker ran inside a backward, in a model with a checkpointed block."""
    block, inputs = nn.Linear(2, 2), torch.ones(1, 2, requires_grad=True)
    with tracker_class() as tracker:
        loss = checkpoint(block, inputs, use_reentrant=False).sum()
        hooks = len(tracker._hooks)
        loss.backward()
        return len(tracker._hooks) - hooks


def test_the_tracker_ignores_recomputed_forwards():
    from torch.utils.module_tracker import ModuleTracker

    assert tracked(ModuleTracker) > 0  # the reason for the subclass
    assert tracked(ForwardModuleTracker) == 0


def left_by_a_discarded_output(tracker):
    """Bytes, before Python looks for cycles."""
    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    gc.disable()
    try:
        with LiveTensors() as counter, tracker():
            layers(torch.ones(1, 2)).relu()
            return counter.live
    finally:
        gc.enable()


def test_the_tracker_keeps_nothing_that_a_model_discards():
    from torch.utils.module_tracker import ModuleTracker

    weights = left_by_a_discarded_output(contextlib.nullcontext)
    assert left_by_a_discarded_output(ModuleTracker) > weights  # the reason for hooks of its own
    assert left_by_a_discarded_output(ForwardModuleTracker) == weights


def test_the_tracker_names_modules_in_forward_and_backward():
    class Noting(torch.autograd.Function):
        parents = None

        @staticmethod
        def forward(context, x):
            Noting.parents = [set(tracker.parents)]
            return x.clone()

        @staticmethod
        def backward(context, gradient):
            Noting.parents.append(set(tracker.parents))
            return gradient

    class Inner(nn.Module):
        def forward(self, x):
            return Noting.apply(x)

    model = nn.Sequential(nn.Linear(2, 2), Inner())
    with ForwardModuleTracker() as tracker:
        model(torch.ones(1, 2)).sum().backward()
    assert all("Sequential.1" in parents and "Sequential.0" not in parents for parents in Noting.parents)
    assert len(Noting.parents) == 2


@pytest.mark.parametrize("tracker", ["ModuleTracker", "ForwardModuleTracker"])
def test_the_tracker_permits_a_gradient_inside_the_forward(tracker):
    from torch.utils.module_tracker import ModuleTracker

    inputs, layer = torch.ones(1, 2, requires_grad=True), nn.Linear(2, 1)
    with (ModuleTracker if tracker == "ModuleTracker" else ForwardModuleTracker)():
        output = layer(inputs)
        if tracker == "ModuleTracker":  # the reason for leaving out leaves
            with pytest.raises(RuntimeError, match="leaf node"):
                torch.autograd.grad(output.sum(), inputs, create_graph=True)
            return
        (slope,) = torch.autograd.grad(output.sum(), inputs, create_graph=True)
        slope.square().sum().backward()
    assert layer.weight.grad.any()


def test_a_dispatch_mode_sees_forward_and_backward():
    weight = torch.ones(2, requires_grad=True)
    with Seen() as seen:
        (weight * 3).sum().backward()
    assert {"mul", "sum", "expand"} <= set(seen.names)
    assert seen.names.count("mul") == 2  # one of them in the backward


def test_a_dispatch_mode_is_not_wrapped():
    """torch by default wraps `__torch_dispatch__`, which costs time in every operation."""
    assert Seen.__torch_dispatch__.__code__.co_filename == __file__


def test_outside_dispatch_modes():
    with Seen() as seen:
        torch.ones(1)
        with outside_dispatch_modes():
            torch.zeros(1)
        torch.full((1,), 2.0)
    assert seen.names == ["ones", "full"]


def test_fake_tensors_have_no_memory():
    mode = fake_tensor_mode()
    weight = mode.from_tensor(torch.ones(3, 4))
    with mode:
        result = weight @ torch.ones(4, 2**40)
    assert result.shape == (3, 2**40)


def test_a_fake_mode_does_not_keep_the_storages_of_calls():
    """torch's own does: in the keys of its cache."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    def is_gone(mode):
        with mode:
            storage = torch.empty(8).untyped_storage()
            seen = weakref.ref(storage)
            torch.empty(0).set_(storage, 0, (8,), (1,))
            del storage
        return seen() is None

    assert is_gone(fake_tensor_mode())
    assert not is_gone(FakeTensorMode())


@pytest.mark.slow
def test_importing_it_imports_nothing_that_is_slow():
    code = """
import sys, torch
before = set(sys.modules)
import trainapp.torch_private
print([name for name in ("torch._subclasses.fake_tensor", "torch.distributed.fsdp", "tensorboard") if name in
       set(sys.modules) - before])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_attention_operators():
    for name in ATTENTION_OPERATORS:
        assert getattr(torch.ops.aten, name).__name__ == name
    heads = torch.ones(1, 1, 4, 8)
    with Seen() as seen:
        nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
    assert set(seen.names) & set(ATTENTION_OPERATORS)


def overflown():
    """A loss scaler that has just unscaled a non-finite gradient."""
    weight = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    weight.grad = torch.tensor([float("inf")])
    scaler.scale(torch.ones(1))  # creates the scale, as scaling a loss does
    scaler.unscale_(optimizer)
    return weight, optimizer, scaler


def test_found_inf_is_the_flag_that_the_scaler_reads():
    weight, optimizer, scaler = overflown()
    (flag,) = found_inf(scaler, optimizer)
    assert float(flag) == 1.0
    weight.grad.fill_(1.0)
    flag.zero_()  # the step now counts as one without overflow, as an all-reduce could decide
    scaler.step(optimizer)
    assert weight.tolist() == [0.0]


def test_forget_unscaling():
    _, optimizer, scaler = overflown()
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.unscale_(optimizer)
    forget_unscaling(scaler)
    scaler.unscale_(optimizer)
    assert scaler.get_scale() == 4.0


def test_fsdps_collectives_can_be_extended():
    """`allocate` for the buffer, then the call: FSDP2's custom collectives must provide both."""
    from torch.distributed.fsdp import FSDPModule

    gather, reduce = fsdp_collectives()
    for collective in (gather, reduce):
        assert callable(collective.allocate)
        assert "__call__" in vars(collective)
        collective()  # takes no arguments
    assert "comm" in inspect.signature(FSDPModule.set_custom_all_gather).parameters
    assert "comm" in inspect.signature(FSDPModule.set_custom_reduce_scatter).parameters


def test_fsdp_decides_once_by_which_parameters_require_gradients():
    """Both methods that `torch_fsdp.prepare` relies on; tests/parallel/test_updates_on_ranks.py trains with it."""
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    assert "sharded_param.requires_grad" in inspect.getsource(FSDPParamGroup._init_mp_dtypes)
    assert "if self._is_root is not None" in inspect.getsource(FSDPState._lazy_init)
    assert callable(FSDPModule._get_fsdp_state)


def test_memory_history_takes_these_arguments():
    """Only the signature: needs no GPU. `test_memory_history_of_a_gpu` calls it."""
    recording = inspect.signature(torch.cuda.memory._record_memory_history)
    recording.bind(max_entries=1, context="alloc", stacks="python")
    recording.bind(enabled=None)
    inspect.signature(torch.cuda.memory._snapshot).bind(torch.device("cuda", 0))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_memory_history_of_a_gpu():
    device = torch.device("cuda", torch.cuda.current_device())
    record_memory_history(1000)
    block = torch.empty(2**20, device=device)
    address = block.data_ptr()
    del block
    snapshot = memory_snapshot(device)
    record_memory_history(None)
    actions = [e["action"] for e in snapshot["device_traces"][device.index] if e["addr"] == address and e["size"]]
    assert actions.index("alloc") < actions.index("free_completed")


def test_a_summary_is_one_event(tmp_path):
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.compat.proto.summary_pb2 import Summary
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path))
    add_summary(writer, Summary(value=[Summary.Value(tag=tag, simple_value=1.0) for tag in ("a", "b")]), 7)
    writer.close()
    (path,) = tmp_path.iterdir()
    events = [event for event in EventFileLoader(str(path)).Load() if event.step == 7]
    assert [[value.tag for value in event.summary.value] for event in events] == [["a", "b"]]


def test_an_event_file_that_cannot_be_written(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    writer, errors = SummaryWriter(str(tmp_path / "events")), []
    guard_event_file(writer, errors.append)
    (path,) = (tmp_path / "events").iterdir()
    path.unlink()
    path.symlink_to("/dev/full")  # the kernel refuses every write
    for step in range(30):  # more than the queue holds
        writer.add_scalar("a", 1.0, step)
        writer.flush()
    writer.close()
    assert [error.errno for error in errors] == [28]


def test_elastic_asks_before_restarts(monkeypatch):
    from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerState
    from torch.distributed.launcher import api

    standard, states = api.LocalElasticAgent, [WorkerState.HEALTHY, *[WorkerState.FAILED] * 3]
    monkeypatch.setattr(standard, "_monitor_workers", lambda *_: RunResult(state=states.pop(0)))
    asked, spec = [], types.SimpleNamespace(max_restarts=3)
    group = types.SimpleNamespace(workers=[Worker(0, global_rank=2), Worker(1, global_rank=3)], spec=spec)

    def decide(ranks: list[int]) -> Restart:
        asked.append(ranks)
        return [Restart.COUNTED, Restart.FREE, Restart.REFUSED][len(asked) - 1]

    with asked_before_restarts(decide):
        agent = api.LocalElasticAgent.__new__(api.LocalElasticAgent)
        assert isinstance(agent, standard)
        agent._remaining_restarts = 3
        left = [agent._monitor_workers(group) and (agent._remaining_restarts, spec.max_restarts) for _ in range(4)]
    assert left == [(3, 3), (3, 3), (4, 4), (0, 4)]
    assert asked == [[2, 3]] * 3
    assert api.LocalElasticAgent is standard


def test_workers_are_told_the_difference_of_two_counts_of_the_agent():
    """What `Restart.FREE` relies on: a restart is known to the workers, though none of those allowed is used up."""
    from torch.distributed.elastic.agent.server import api, local_elastic_agent

    assert "restart_count = spec.max_restarts - self._remaining_restarts" in inspect.getsource(
        local_elastic_agent.LocalElasticAgent._start_workers
    )
    assert "if self._remaining_restarts > 0" in inspect.getsource(api.SimpleElasticAgent._invoke_run)


def private_uses(source):
    """The private attributes of torch objects that a file reads, and the private modules that it imports."""
    scaler, optimizer = torch.amp.GradScaler("cpu"), torch.optim.SGD([torch.zeros(1)])
    owners = [torch, torch.Tensor, torch.UntypedStorage, nn.Module(), nn.modules.batchnorm, torch.cuda.memory]
    private = {name for owner in (*owners, scaler, optimizer) for name in dir(owner) if name.startswith("_")}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            yield from (name.name for name in node.names if f".{node.module}.{name.name}".count("._"))
        elif isinstance(node, ast.Attribute) and node.attr in private and not node.attr.endswith("__"):
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls", "os")
            if not own:
                yield node.attr


def test_nothing_private_is_used_elsewhere():
    planted = "from torch._subclasses import fake_tensor\ntorch._foreach_norm(tensor._version, self._version)"
    assert list(private_uses(planted)) == ["fake_tensor", "_foreach_norm", "_version"]
    folder = Path(torch_private.__file__).parent
    names = ("private", "direct", "elastic", "fsdp", "operators", "modes", "workers")
    own = {folder / f"torch_{name}.py" for name in names}
    own |= {folder / "planning" / f"{name}.py" for name in ("pretend", "absent_gpu")}  # see their tests
    found = {path.name: list(private_uses(path.read_text())) for path in folder.rglob("*.py") if path not in own}
    assert {name: uses for name, uses in found.items() if uses} == {}


def test_parameters_are_replaced_through_their_dictionary():
    layer = nn.Linear(2, 3)
    assert list(parameters_of(layer)) == ["weight", "bias"]
    other = torch.zeros(3, 2)
    parameters_of(layer)["weight"] = other
    assert layer.weight is other


def test_tracing_is_seen():
    assert not is_tracing()
    with fake_tensor_mode():
        assert is_tracing()
    assert not is_tracing()


def test_a_function_is_applied_to_every_leaf():
    assert tree_map(lambda leaf: leaf + 1, {"a": [1, (2,)]}) == {"a": [2, (3,)]}


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.strided])
def test_strided_parts_hold_all_of_a_tensor(layout):
    tensor = torch.eye(4).to_sparse(layout=layout) if layout is not torch.strided else torch.eye(4)
    parts = strided_parts(tensor)
    assert all(part.layout is torch.strided for part in parts)
    assert float(parts[-1].sum()) == 4


def test_what_checkpointing_reads_of_operators():
    """Schemas of operators, and the formulas of torch's counter of operations."""
    aten = torch.ops.aten
    assert FLOP_FORMULAS[aten.mm](torch.ones(2, 3), torch.ones(3, 5), out_val=torch.ones(2, 5)) == 2 * 2 * 3 * 5
    assert schema_of(aten.relu_.default).is_mutable
    assert not schema_of(aten.relu.default).is_mutable
    assert [argument.name for argument in schema_of(aten.mm.default).arguments] == ["self", "mat2"]


def test_all_leaves():
    assert tree_leaves({"a": [1, (2,)], "b": None}) == [1, 2, None]


def test_a_view_knows_its_base():
    whole = torch.ones(2, 2)
    assert base_of(whole.T[0]) is whole
    assert base_of(whole) is None


def test_fake_tensors_are_recognised():
    with fake_tensor_mode() as mode:
        assert is_fake(nn.Parameter(mode.from_tensor(torch.ones(2))))
    assert not is_fake(nn.Parameter(torch.ones(2)))


def storages(weight):
    """How many a parameter and a view of it have; one, outside of fake modes."""
    return len({storage_id(tensor.untyped_storage()) for tensor in (weight, weight.t())})


def test_a_copied_fake_tensor_stays_in_its_mode():
    from torch._subclasses.fake_tensor import FakeTensorMode

    for mode, expected in ((fake_tensor_mode(), 1), (FakeTensorMode(allow_non_fake_inputs=True), 2)):
        with mode:
            weight = copy.deepcopy(nn.Linear(3, 4)).weight
            assert storages(weight) == expected  # when the last one fails, torch's own mode does
    assert storages(nn.Linear(3, 4).weight) == 1


def _exchanged(_, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
    done = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def test_buckets_are_rebuilt_once():
    import torch.distributed as dist

    dist.init_process_group("fake", rank=0, world_size=2)
    try:
        model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)), bucket_cap_mb=25)
        model.register_comm_hook(None, _exchanged)
        assert not rebuild_buckets(model)
        model(torch.ones(1, 2)).sum().backward()
        assert rebuild_buckets(model)
        assert not rebuild_buckets(model)
    finally:
        dist.destroy_process_group()


def test_which_arguments_an_operator_writes():
    aten = torch.ops.aten
    assert written_arguments(aten.add_.Tensor)[:2] == (True, False)
    assert not any(written_arguments(aten.add.Tensor))
    assert written_arguments(aten._fused_adamw_.default)[:5] == (True, True, True, True, True)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.AdamW])
def test_which_fused_optimizers_have_no_meta_kernel(kind):
    """When one of the first two gets one, it need not be named any longer."""
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    with RecordedOperations() as run:
        kind([weight], lr=0.1, fused=True).step()
    (fused,) = {func for func in run.seen if "fused" in func.name()}
    is_missing = not torch._C._dispatch_has_kernel_for_dispatch_key(fused.name(), "Meta")
    assert (fused.overloadpacket in FUSED_WITHOUT_META) == is_missing == (kind is not torch.optim.AdamW)


def test_cpp_asks_tensors_without_data_for_their_device():
    """More often than for anything else, so that a mode that passes the question on costs time."""
    seen = []

    class Sees(DispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            seen.append(func)
            assert func is not ASKS_DEVICE or result == args[0].device
            return result

    with Sees():
        torch.ones(2, requires_grad=True).sum().backward()
    assert ASKS_DEVICE not in seen
    with fake_tensor_mode(), Sees():
        torch.ones(2, requires_grad=True).sum().backward()
    assert seen.count(ASKS_DEVICE) > 1


def test_unique_is_an_operator_of_its_own():
    with RecordedOperations() as run:
        torch.ones(2).unique()
    assert UNIQUE in run.seen


def test_an_unsafe_view_may_be_changed_in_place():
    class Shaped(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, reshape):
            return reshape(x * 2, [6])

        @staticmethod
        def backward(ctx, gradient):
            return 2 * gradient.view(2, 3), None

    x = torch.ones(2, 3, requires_grad=True)
    Shaped.apply(x, unsafe_view).relu_().sum().backward()
    assert torch.equal(x.grad, torch.full((2, 3), 2.0))
    with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        Shaped.apply(x, torch.Tensor.view).relu_()


def test_the_product_of_integers_is_exact():
    a, b = (torch.arange(-128, 128, dtype=torch.int8).repeat(4).view(16, 64) for _ in range(2))
    assert int8_product(a, b.t()).dtype == torch.int32
    assert torch.equal(int8_product(a, b.t()).double(), a.double() @ b.t().double())


class AsksForItsWorker(torch.utils.data.Dataset):
    def __getitem__(self, index):
        before = is_loader_worker()
        if index == 1:
            become_main_process()
        return before, is_loader_worker()


def test_a_worker_can_forget_that_it_is_one():
    loader = torch.utils.data.DataLoader(AsksForItsWorker(), batch_size=None, sampler=[0, 1, 2], num_workers=1)
    assert [tuple(bool(answer) for answer in found) for found in loader] == [
        (True, True),
        (True, False),
        (False, False),
    ]
    assert not is_loader_worker()


def test_hooks_around_a_forward_are_seen():
    layer = nn.Linear(2, 2)
    assert not has_forward_hooks(layer)
    layer.register_forward_pre_hook(lambda *_: None)
    assert has_forward_hooks(layer)
