"""One test of each private part of torch that the program uses: it fails when torch changes that part."""

import ast
import contextlib
import copy
import gc
import inspect
import types
import weakref
from pathlib import Path
from unittest import mock

import pytest
import torch
from recorded_operations import RecordedOperations
from torch import nn
from torch.optim import optimizer as torch_optimizer
from torch.utils.checkpoint import checkpoint
from torch.utils.module_tracker import ModuleTracker

from trainapp import torch_private as private
from trainapp.memory.live_tensors import LiveTensors

# --- tensors and storages


def test_foreach_kernels_are_one_operation():
    tensors, copies = [torch.tensor([3.0, 4.0]), torch.ones(2, 2)], [torch.zeros(2), torch.zeros(2, 2)]
    with RecordedOperations() as seen:
        norms = private.foreach_norm(tensors)
    assert (seen.names, [float(norm) for norm in norms]) == (["_foreach_norm"], [5.0, 2.0])
    private.foreach_mul_(tensors, torch.tensor(2.0))
    private.foreach_copy_(copies, tensors)
    assert tensors[0].tolist() == copies[0].tolist() == [6.0, 8.0]


def test_storage_id_is_of_the_storage():
    tensor, empty = torch.zeros(4), [torch.zeros(0), torch.zeros(0)]
    assert private.storage_id(tensor.untyped_storage()) == private.storage_id(tensor[2:].untyped_storage())
    assert len({private.storage_id(t.untyped_storage()) for t in (tensor, *empty)}) == 3
    assert len({t.data_ptr() for t in empty}) == 1  # why the address of the data does not serve


def test_a_view_knows_its_base():
    whole = torch.ones(2, 2)
    assert private.base_of(whole.T[0]) is whole
    assert private.base_of(whole) is None


def test_a_backward_has_a_number_of_its_own():
    seen = []
    tensor = torch.ones(2, requires_grad=True)
    tensor.register_hook(lambda gradient: seen.append(private.graph_task()))
    tensor.sum().backward()
    assert seen[0] >= 0 > private.graph_task() == -1


def test_compiled_functions_can_draw_by_torchs_kernels():
    """What it does to numbers, training/test_draws_of_a_run.py shows."""
    from torch._inductor import config

    before = config.fallback_random
    for on in (True, before):
        private.draw_as_uncompiled(on)
        assert config.fallback_random is on


def test_version_counts_writes_but_not_batchnorms():
    """The latter is why the version alone does not show that a buffer of the state is unchanged."""
    norm = nn.BatchNorm1d(2)
    mean, before = norm.running_mean, private.version_of(norm.running_mean)
    norm(torch.randn(4, 2))
    assert mean.any()
    assert private.version_of(mean) == before
    mean.add_(1)
    assert private.version_of(mean) > before


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.strided])
def test_strided_parts_hold_all_of_a_tensor(layout):
    tensor = torch.eye(4).to_sparse(layout=layout) if layout is not torch.strided else torch.eye(4)
    parts = private.strided_parts(tensor)
    assert all(part.layout is torch.strided for part in parts)
    assert float(parts[-1].sum()) == 4


# --- modules


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.LazyBatchNorm1d, nn.LayerNorm])
def test_every_batchnorm_is_one(kind):
    assert issubclass(kind, private.BatchNorm) == (kind is not nn.LayerNorm)


def test_names_in_state_dicts():
    class Counter(nn.Module):
        def get_extra_state(self):
            return 3

    compiled = torch.compile(nn.Linear(1, 1, bias=False))
    assert list(compiled.state_dict()) == [f"{private.COMPILED_PREFIX}weight"]
    assert nn.Sequential(Counter()).state_dict() == {f"0.{private.EXTRA_STATE}": 3}


def test_registries_are_the_modules_dictionaries():
    module, replacement = nn.Module(), nn.Parameter(torch.zeros(2))
    module.register_buffer("state", torch.ones(2))
    module.register_buffer("table", torch.ones(2), persistent=False)
    module.register_parameter("scale", None)
    module.inner = nn.Linear(1, 1)
    assert private.non_persistent_buffers(module) == {"table"}
    assert "table" not in private.MODULE_ATTRIBUTES
    parameters, buffers, modules = private.registries_of(module)
    assert (list(parameters), list(buffers), list(modules)) == (["scale"], ["state", "table"], ["inner"])
    parameters["scale"] = buffers["state"] = replacement
    modules["inner"] = None
    assert module.scale is module.state is replacement
    assert module.inner is None
    assert not private.has_forward_hooks(module)
    module.register_forward_pre_hook(lambda *_: None)
    assert private.has_forward_hooks(module)


def left_by(tracker):
    """Bytes that a model leaves which discards its output, before Python looks for cycles."""
    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    gc.disable()
    try:
        with LiveTensors() as counter, tracker():
            layers(torch.ones(1, 2)).relu()
            return counter.live
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", [ModuleTracker, private.ForwardModuleTracker])
def test_the_tracker_hooks_nothing_that_is_recomputed_discarded_or_a_leaf(kind):
    """torch's own does: the reasons for a subclass."""
    inputs, layer = torch.ones(1, 2, requires_grad=True), nn.Linear(2, 2)
    with kind() as tracker:
        loss = checkpoint(layer, inputs, use_reentrant=False).sum()
        hooks = len(tracker._hooks)
        loss.backward()
        hooks_recomputed = len(tracker._hooks) > hooks
    keeps_discarded = left_by(kind) > left_by(contextlib.nullcontext)
    fails_at_leaves = False
    with kind():
        try:
            torch.autograd.grad(layer(inputs).sum(), inputs, create_graph=True)
        except RuntimeError:
            fails_at_leaves = True
    assert (hooks_recomputed, keeps_discarded, fails_at_leaves) == (kind is ModuleTracker,) * 3


def test_the_tracker_names_modules_in_forward_and_backward():
    seen = []

    class Noting(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            seen.append(set(tracker.parents))
            return x.clone()

        @staticmethod
        def backward(context, gradient):
            seen.append(set(tracker.parents))
            return gradient

    class Inner(nn.Module):
        def forward(self, x):
            return Noting.apply(x)

    model = nn.Sequential(nn.Linear(2, 2), Inner())
    with private.ForwardModuleTracker() as tracker:
        model(torch.ones(1, 2)).sum().backward()
    assert ["Sequential.1" in parents and "Sequential.0" not in parents for parents in seen] == [True, True]


# --- containers


def test_registered_containers_are_opened_and_rebuilt():
    class Pair:
        def __init__(self, first, second):
            self.first, self.second = first, second

    assert private.registered_container(Pair) is None
    torch.utils._pytree.register_pytree_node(
        Pair, lambda pair: ([pair.first, pair.second], "context"), lambda values, context: Pair(*values)
    )
    node = private.registered_container(Pair)
    assert node.flatten_fn(Pair(1, 2)) == ([1, 2], "context")
    assert node.unflatten_fn([3, 4], "context").second == 4
    assert private.tree_map(lambda leaf: leaf + 1, {"a": [1, (2,)]}) == {"a": [2, (3,)]}


# --- backward and the optimizer's step


def network_and_loss(dtype=torch.float32):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)).to(dtype)
    return network, network(torch.randn(5, 4, dtype=dtype)).sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_backward_gives_the_same_gradients(dtype):
    weight = torch.tensor(0.3)  # of another dtype than the loss: the documented way
    (direct, one), (documented, other) = network_and_loss(dtype), network_and_loss(dtype)
    for network, loss, way in ((direct, one, private.backward), (documented, other, torch.Tensor.backward)):
        for _ in range(2):  # they add up
            way(loss, weight.to(dtype) if dtype is not torch.float64 else weight)
            loss = network(torch.ones(1, 4, dtype=dtype)).sum()
    pairs = zip(direct.parameters(), documented.parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in pairs)
    with pytest.raises(RuntimeError, match="second time"):
        private.backward(one, weight.to(dtype))
    with pytest.raises(RuntimeError, match="does not require grad"):
        private.backward(torch.tensor(1.0), torch.tensor(1.0))


def test_what_a_failed_backward_left_in_the_engine_is_released():
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise torch.OutOfMemoryError

    leaf = torch.ones(3, requires_grad=True)
    saved = [leaf * 2, leaf * 3]  # of two branches, one of which waits while the other fails
    loss = sum((part.sin() + Failing.apply(part)).sum() for part in saved)
    storages = [weakref.ref(part.untyped_storage()) for part in saved]
    with pytest.raises(torch.OutOfMemoryError):
        loss.backward()
    del loss, saved
    kept = sum(storage() is not None for storage in storages)
    private.release_failed_backward()
    assert not any(storage() is not None for storage in storages)
    assert kept, "torch keeps none: nothing is to be released any more"


def optimizer_of(kind=torch.optim.AdamW):
    network, loss = network_and_loss()
    loss.backward()
    return network, kind(network.parameters(), lr=0.1)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adafactor])
def test_step_gives_the_same_parameters(kind):
    (direct, one), (documented, other) = optimizer_of(kind), optimizer_of(kind)
    for _ in range(3):
        private.step_optimizer(one)
        other.step()
    assert all(map(torch.equal, direct.parameters(), documented.parameters()))


def test_whoever_observes_a_step_sees_it(monkeypatch):
    """A profiler, hooks of the optimizer and of all, and a `step` that was replaced, as torch's schedulers do."""
    monkeypatch.setattr(torch.autograd.profiler, "_is_profiler_enabled", False)  # other tests may leave it
    _, optimizer = optimizer_of()
    with torch.profiler.profile() as profile:
        private.step_optimizer(optimizer)
    assert [e.name for e in profile.events() if e.name.startswith("Optimizer")] == ["Optimizer.step#AdamW.step"]
    calls = []
    for register in (
        optimizer.register_step_pre_hook,
        optimizer.register_step_post_hook,
        torch_optimizer.register_optimizer_step_pre_hook,
        torch_optimizer.register_optimizer_step_post_hook,
    ):
        handle = register(lambda *_: calls.append("hook"))
        private.step_optimizer(optimizer)
        handle.remove()
        private.step_optimizer(optimizer)
    assert calls == ["hook"] * 4
    optimizer.step = lambda: calls.append("replaced")
    private.step_optimizer(optimizer)
    private.step_optimizer(types.SimpleNamespace(step=lambda: calls.append("none of torch's")))
    assert calls[4:] == ["replaced", "none of torch's"]


# --- dispatch modes and fake tensors


def test_a_dispatch_mode_sees_forward_and_backward():
    weight = torch.ones(2, requires_grad=True)
    with RecordedOperations() as seen:
        (weight * 3).sum().backward()
        with private.outside_dispatch_modes():
            torch.zeros(1)
    assert {"mul", "sum", "expand"} <= set(seen.names)
    assert seen.names.count("mul") == 2  # one of them in the backward
    assert "zeros" not in seen.names
    # By default torch wraps the method, which costs time in every operation.
    assert RecordedOperations.__torch_dispatch__.__code__.co_filename.endswith("recorded_operations.py")


def test_fake_tensors_have_no_memory_and_are_recognised():
    with private.fake_tensor_mode() as mode:
        weight = mode.from_tensor(torch.ones(3, 4))
        assert (weight @ torch.ones(4, 2**40)).shape == (3, 2**40)
        assert private.is_fake(nn.Parameter(weight))
    assert not private.is_fake(nn.Parameter(torch.ones(2)))


def test_a_fake_mode_keeps_no_storages_and_copies_stay_in_it():
    """When torch's own does no longer differ, the subclass can go."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    found = []
    for mode in (private.fake_tensor_mode(), FakeTensorMode(allow_non_fake_inputs=True)):
        with mode:
            storage = torch.empty(8).untyped_storage()
            seen = weakref.ref(storage)
            torch.empty(0).set_(storage, 0, (8,), (1,))
            del storage
            weight = copy.deepcopy(nn.Linear(3, 4)).weight
            storages = {private.storage_id(tensor.untyped_storage()) for tensor in (weight, weight.t())}
            found.append((seen() is None, len(storages)))
    assert found == [(True, 1), (False, 2)]


# --- operators


def test_what_operators_are():
    aten = torch.ops.aten
    with RecordedOperations() as run:
        torch.ones(()).item()
        bool(torch.ones(()) > 0)
        nn.functional.scaled_dot_product_attention(*[torch.ones(1, 1, 4, 8)] * 3, is_causal=True)
    assert sum(func in private.READ_OPERATORS for func in run.seen) == 2
    assert all(private.may_view(op) for op in (aten.t.default, aten.reshape.default, private.LIFT))
    assert not any(private.may_view(op) for op in (aten.add_.Tensor, aten.mm.default))
    assert {func.overloadpacket.__name__ for func in run.seen} & set(private.ATTENTION_OPERATORS)
    assert all(getattr(aten, name).__name__ == name for name in private.ATTENTION_OPERATORS)
    calls = [(aten.bernoulli_.float, {}), (aten._cudnn_rnn.default, {"dropout": 0.1})]
    assert all(private.draws_numbers(operation, [], options) for operation, options in calls)
    calls = [(aten.mm.default, {}), (aten._cudnn_rnn.default, {"dropout": 0.0})]
    assert not any(private.draws_numbers(operation, [], options) for operation, options in calls)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.AdamW])
def test_which_fused_optimizers_have_no_meta_kernel(kind):
    """When one of the first two gets one, it need not be named any longer."""
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    with RecordedOperations() as run:
        kind([weight], lr=0.1, fused=True).step()
    (fused,) = {func for func in run.seen if "fused" in func.name()}
    is_missing = not torch._C._dispatch_has_kernel_for_dispatch_key(fused.name(), "Meta")
    assert (fused.overloadpacket in private.FUSED_WITHOUT_META) == is_missing == (kind is not torch.optim.AdamW)


def test_cpp_asks_tensors_without_data_for_their_device():
    """More often than for anything else, so that a mode that passes the question on costs time."""
    with private.fake_tensor_mode(), RecordedOperations() as run:
        torch.ones(2, requires_grad=True).sum().backward()
    assert run.seen.count(private.ASKS_DEVICE) > 1


def test_an_unsafe_view_may_be_changed_in_place():
    class Shaped(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, reshape):
            return reshape(x * 2, [6])

        @staticmethod
        def backward(ctx, gradient):
            return 2 * gradient.view(2, 3), None

    x = torch.ones(2, 3, requires_grad=True)
    Shaped.apply(x, private.unsafe_view).relu_().sum().backward()
    assert torch.equal(x.grad, torch.full((2, 3), 2.0))
    with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        Shaped.apply(x, torch.Tensor.view).relu_()


def test_the_product_of_integers_is_exact():
    a, b = (torch.arange(-128, 128, dtype=torch.int8).repeat(4).view(16, 64) for _ in range(2))
    assert private.int8_product(a, b.t()).dtype == torch.int32
    assert torch.equal(private.int8_product(a, b.t()).double(), a.double() @ b.t().double())


# --- the loss scaler


def test_the_scalers_verdict_is_shared_and_forgotten():
    weight = torch.ones(1, requires_grad=True)
    optimizer, scaler = torch.optim.SGD([weight], lr=1.0), torch.amp.GradScaler("cpu", init_scale=4.0)
    weight.grad = torch.tensor([float("inf")])
    scaler.scale(torch.ones(1))  # creates the scale, as scaling a loss does
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.unscale_(optimizer)
    private.forget_unscaling(scaler)
    scaler.unscale_(optimizer)
    (flag,) = private.found_inf(scaler, optimizer)
    assert (float(flag), scaler.get_scale()) == (1.0, 4.0)
    weight.grad.fill_(1.0)
    flag.zero_()  # the step now counts as one without overflow, as an all-reduce could decide
    scaler.step(optimizer)
    assert weight.tolist() == [0.0]


# --- ranks


def _exchanged(_, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
    done = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def test_buckets_are_rebuilt_once_and_buffers_left_alone():
    import torch.distributed as dist

    dist.init_process_group("fake", rank=0, world_size=2)
    try:
        layers = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
        model = nn.parallel.DistributedDataParallel(layers, bucket_cap_mb=25)
        model.register_comm_hook(None, _exchanged)
        assert model.will_sync_module_buffers()
        model.broadcast_buffers = False  # as trainapp's DDP does
        assert not model.will_sync_module_buffers()
        assert not private.rebuild_buckets(model)
        model(torch.ones(2, 2)).sum().backward()
        assert private.rebuild_buckets(model)
        assert not private.rebuild_buckets(model)
    finally:
        dist.destroy_process_group()


def test_fsdps_parts():
    """Collectives with `allocate` and a call, and what `prepare_fsdp` calls; tests/parallel trains with them."""
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
    from torch.distributed.tensor import DTensor

    for collective in private.fsdp_collectives():
        assert callable(collective.allocate)
        assert "__call__" in vars(collective)
        collective()  # takes no arguments
    assert "comm" in inspect.signature(FSDPModule.set_custom_all_gather).parameters
    assert "comm" in inspect.signature(FSDPModule.set_custom_reduce_scatter).parameters
    assert "sharded_param.requires_grad" in inspect.getsource(FSDPParamGroup._init_mp_dtypes)
    assert "if self._is_root is not None" in inspect.getsource(FSDPState._lazy_init)
    assert callable(FSDPModule._get_fsdp_state)
    final = inspect.getsource(FSDPState._root_post_backward_final_callback)
    assert "state._training_state = TrainingState.IDLE" in final  # `is_in_forward`
    assert "_local_tensor" in DTensor.__slots__


def test_muon_orthogonalises_by_this_function():
    """A plain gradient's update is left alone; tests/parallel trains with shards."""
    p = nn.Parameter(torch.ones(2, 2))
    p.grad = torch.eye(2)
    before = torch.optim._muon._zeropower_via_newtonschulz
    with private.sharded_muon_updates() as own:
        assert torch.equal(own(p.grad, (3.4, -4.8, 2.0), 5, 1e-7), before(p.grad, (3.4, -4.8, 2.0), 5, 1e-7))
    with mock.patch.object(torch.optim._muon, before.__name__, wraps=before) as called:
        torch.optim.Muon([p]).step()
    assert called.call_count == 1


def test_elastic_asks_before_restarts(monkeypatch):
    """FREE relies on what workers are told: the difference of two counts of the agent."""
    from torch.distributed.elastic.agent.server import local_elastic_agent
    from torch.distributed.elastic.agent.server.api import RunResult, SimpleElasticAgent, WorkerState
    from torch.distributed.launcher import api

    source = inspect.getsource(local_elastic_agent.LocalElasticAgent._start_workers)
    assert "restart_count = spec.max_restarts - self._remaining_restarts" in source
    assert "if self._remaining_restarts > 0" in inspect.getsource(SimpleElasticAgent._invoke_run)
    standard, states = api.LocalElasticAgent, [WorkerState.HEALTHY, *[WorkerState.FAILED] * 3]
    monkeypatch.setattr(standard, "_monitor_workers", lambda *_: RunResult(state=states.pop(0)))
    spec = types.SimpleNamespace(max_restarts=3)
    group = types.SimpleNamespace(spec=spec)
    decisions = [private.Restart.COUNTED, private.Restart.FREE, private.Restart.REFUSED]
    with private.asked_before_restarts(lambda: decisions.pop(0)):
        agent = api.LocalElasticAgent.__new__(api.LocalElasticAgent)
        agent._remaining_restarts = 3
        left = [agent._monitor_workers(group) and (agent._remaining_restarts, spec.max_restarts) for _ in range(4)]
    assert left == [(3, 3), (3, 3), (4, 4), (0, 4)]
    assert decisions == []
    assert api.LocalElasticAgent is standard


class AsksForItsWorker(torch.utils.data.Dataset):
    def __getitem__(self, index):
        before = torch.utils.data.get_worker_info()
        private.become_main_process()
        return before is not None, torch.utils.data.get_worker_info() is not None


def test_a_worker_can_forget_that_it_is_one():
    loader = torch.utils.data.DataLoader(AsksForItsWorker(), batch_size=None, sampler=[0, 1], num_workers=1)
    assert [tuple(map(bool, found)) for found in loader] == [(True, False), (False, False)]


# --- hooks on the gradients of parameters


def test_a_copy_gets_the_hooks_of_its_original():
    original = nn.Parameter(torch.ones(2))
    assert not private.has_accumulation_hooks(original)
    seen = []
    original.register_hook(lambda gradient: 2 * gradient)
    original.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter))
    copied, frozen = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2), requires_grad=False)
    private.copy_gradient_hooks(original, copied)
    private.copy_gradient_hooks(original, frozen)
    copied.sum().backward()
    assert copied.grad.tolist() == [2, 2]
    assert len(seen) == 1
    assert seen[0] is copied
    assert private.has_accumulation_hooks(original)
    assert not private.has_accumulation_hooks(frozen)


# --- CUDA


def test_memory_history_takes_these_arguments():
    """Only the signature: needs no GPU. gpu/test_cuda.py reads a snapshot."""
    recording = inspect.signature(torch.cuda.memory._record_memory_history)
    recording.bind(max_entries=1, context="alloc", stacks="python")
    recording.bind(enabled=None)
    inspect.signature(torch.cuda.memory._snapshot).bind(torch.device("cuda", 0))


# --- nowhere else


def private_uses(source):
    """The private attributes of torch objects that a file reads, and the private modules that it imports."""
    scaler, optimizer = torch.amp.GradScaler("cpu"), torch.optim.SGD([torch.zeros(1)])
    owners = [torch, torch.Tensor, torch.UntypedStorage, nn.Module(), nn.modules.batchnorm, torch.cuda.memory]
    names = {name for owner in (*owners, scaler, optimizer) for name in dir(owner) if name.startswith("_")}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            yield from (name.name for name in node.names if f".{node.module}.{name.name}".count("._"))
        elif isinstance(node, ast.Attribute) and node.attr in names and not node.attr.endswith("__"):
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls", "os")
            if not own:
                yield node.attr


def test_nothing_private_is_used_elsewhere():
    planted = "from torch._subclasses import fake_tensor\ntorch._foreach_norm(tensor._version, self._version)"
    assert list(private_uses(planted)) == ["fake_tensor", "_foreach_norm", "_version"]
    file = Path(private.__file__)
    own = {file, *(file.parent / "planning" / f"{name}.py" for name in ("pretend", "cuda_kernels"))}  # see their tests
    found = {path.name: list(private_uses(path.read_text())) for path in file.parent.rglob("*.py") if path not in own}
    assert {name: uses for name, uses in found.items() if uses} == {}
