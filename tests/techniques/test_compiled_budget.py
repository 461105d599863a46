"""Checkpointing by budget of a compiled model: what its graph saves fits, and the gradients are those without."""

import contextlib
import logging
import shutil

import pytest
import runs
import torch
from torch import nn
from torch._dynamo.backends.registry import lookup_backend

from trainapp.config.schema import ActivationCheckpointing, Memory
from trainapp.errors import UserError
from trainapp.memory.cpu import CpuMemory
from trainapp.memory.kinds import MemoryKind
from trainapp.memory.live_tensors import LiveTensors
from trainapp.techniques import activation_checkpointing, compiled_budget, graph_memory
from trainapp.techniques.block_trace import Skeleton
from trainapp.techniques.budget import Budget
from trainapp.techniques.compiled_budget import MARGIN, SHARES, CompiledBudget, LossMemory
from trainapp.techniques.graph_memory import measured
from trainapp.techniques.loss_trace import loss_memory
from trainapp.torch_compiler import copy_of, split_at

CPU = torch.device("cpu")
needs_a_compiler = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="torch.compile needs a C++ compiler"
)
GPT = (
    *("model=gpt", "model.depth=2", "model.width=32", "model.heads=2", "model.context_length=32"),
    *("data=synthetic_tokens", "data.vocab_size=64", "data.size=200", "checkpointing=off"),
    *("batch.micro_size=8", "train.compile=true", "train.max_steps=6"),
)


class Mlp(nn.Module):
    """Blocks that widen to `width`."""

    def __init__(self, depth=4, width=64, dropout=0.0):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, width), nn.GELU(), nn.Dropout(dropout), nn.Linear(width, 16))
            for _ in range(depth)
        )

    def blocks(self):
        return list(self.layers)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


def squared(model, batch):
    return model(batch).square().sum(), len(batch), {}


def traced(model, budget):
    """The model as torch traces and splits it, run operation by operation: all of compilation but the code."""
    from functorch.compile import aot_module
    from torch.fx import Interpreter

    def interpreted(graph, inputs):
        def run(values):
            return Interpreter(graph).boxed_run(values)

        run._boxed_call = True
        return run

    return aot_module(model, fw_compiler=interpreted, partition_fn=budget.split)


def backward(model, loss_of, x, seed=1):
    """The gradients, and the bytes that were saved for them besides parameters and the batch."""
    own = {t.untyped_storage()._cdata for t in (*model.parameters(), x)}
    stored = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            stored[storage._cdata] = storage.nbytes()
        return tensor

    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = loss_of(x)
    torch.autograd.backward(y, 2 * y.detach())
    return runs.gradients(model), sum(stored.values())


def built(dropout=0.0):
    torch.manual_seed(0)
    return Mlp(dropout=dropout), torch.randn(32, 16)


def chosen(caplog):
    """The shares that were logged."""
    return [record.args[2] for record in caplog.records if "activation_memory_budget" in record.message]


# What is saved


@pytest.mark.parametrize("limit", [10**6, 60_000, 40_000, 25_000, 12_000, 1])
def test_what_is_saved_is_measured_and_fits(limit, caplog):
    model, x = built()
    expected, everything = backward(model, model, x)
    budget = CompiledBudget()
    budget.begin("x", limit)
    with caplog.at_level(logging.INFO):
        gradients, saved = backward(model, traced(model, budget), x)
    assert runs.relative_error(gradients, expected) < 1e-6
    assert saved == sum(graph.kept for graph in budget._shapes["x"].graphs)
    assert saved <= limit or (limit == 1 and saved < everything)


@pytest.mark.slow
def test_less_is_saved_for_less(caplog):
    found = []
    for limit in (10**6, 60_000, 25_000):
        model, x = built()
        budget = CompiledBudget()
        budget.begin("x", limit)
        with caplog.at_level(logging.INFO):
            found.append(backward(model, traced(model, budget), x)[1])
    assert found == sorted(set(found), reverse=True)
    shares = chosen(caplog)
    assert shares[0] == 1.0
    assert shares == sorted(shares, reverse=True)


def test_the_largest_share_that_fits_is_taken(monkeypatch, caplog):
    """And no smaller one is tried, which would recompute more."""
    tried = []

    def noting(share, *arguments, **options):
        tried.append(share)
        return split_at(share, *arguments, **options)

    monkeypatch.setattr(compiled_budget, "split_at", noting)
    model, x = built()
    budget = CompiledBudget()
    budget.begin("x", 40_000)
    with caplog.at_level(logging.INFO):
        backward(model, traced(model, budget), x)
    (share,) = chosen(caplog)
    assert tried == [*SHARES[: SHARES.index(share) + 1], share]
    assert 0 < share < 1


@pytest.mark.slow
@pytest.mark.parametrize("limit", [60_000, 40_000, 25_000, 1])
def test_random_numbers_are_not_drawn_again(limit):
    model, x = built(dropout=0.3)
    everything = CompiledBudget()
    everything.begin("x", 10**9)
    expected, _ = backward(model, traced(model, everything), x)
    budget = CompiledBudget()
    budget.begin("x", limit)
    assert runs.relative_error(backward(model, traced(model, budget), x)[0], expected) < 1e-6


@pytest.mark.slow
def test_torch_itself_would_draw_them_again(monkeypatch):
    """The comparison above can fail."""
    for module in (compiled_budget, graph_memory):
        monkeypatch.setattr(module, "draws_numbers", lambda node: False)
    model, x = built(dropout=0.3)
    everything = CompiledBudget()
    everything.begin("x", 10**9)
    expected, _ = backward(model, traced(model, everything), x)
    budget = CompiledBudget()
    budget.begin("x", 1)
    assert runs.relative_error(backward(model, traced(model, budget), x)[0], expected) > 0.1


@pytest.mark.slow
def test_too_little_is_said_once(caplog):
    model, x = built()
    budget = CompiledBudget()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            budget.begin("x", 1, LossMemory(batch=0, loss=0))
            backward(model, traced(model, budget), x)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "1 B are left, but at every value of torch's budget" in caplog.text


def test_a_graph_that_cannot_be_measured_is_compiled_as_usual(monkeypatch, caplog):
    def fails(*_):
        raise ValueError("no sizes")

    monkeypatch.setattr(compiled_budget, "measured", fails)
    model, x = built()
    expected, _ = backward(model, model, x)
    budget = CompiledBudget()
    budget.begin("x", 1)
    assert runs.relative_error(backward(model, traced(model, budget), x)[0], expected) < 1e-6
    assert "cannot be measured (ValueError: no sizes)" in caplog.text


# Peaks


def halves_of(model, x, share):
    found = []

    class Noting(CompiledBudget):
        def split(self, graph, inputs, **options):
            halves = split_at(share, copy_of(graph), inputs, **options)
            found.append(measured(share, halves, options["num_fwd_outputs"]))
            return split_at(share, graph, inputs, **options)

    return traced(model, Noting()), found


@pytest.mark.parametrize("share", [1.0, 0.5, 0.0])
def test_peaks_are_those_of_the_operations_one_by_one(share):
    """Compiled code fuses some of them, and needs no more."""
    model, x = built()
    function, found = halves_of(model, x, share)
    function(x)  # traces
    counter = LiveTensors()
    counter.register({MemoryKind.PARAMETERS: model.parameters(), MemoryKind.BATCH: [x]})
    before = counter.live
    with counter:
        y = function(x)
    assert counter.peak - before == found[0].forward
    assert counter.live - before == found[0].between
    gradient = torch.ones_like(y)
    counter.register({MemoryKind.GRADIENTS: [gradient]})
    counter.peak = counter.live
    with counter:
        y.backward(gradient)
    result = y.untyped_storage().nbytes()  # alive, too
    assert counter.peak - before == found[0].backward + result


@pytest.mark.slow
def test_the_limit_of_a_peak_counts_batch_and_loss(caplog):
    model, x = built()
    function, found = halves_of(model, x, 1.0)
    function(x)
    highest = max(found[0].forward, found[0].between + 500, found[0].backward)
    needed = int((highest + 100) * (1 + MARGIN))
    for limit, default in ((needed, True), (needed - 1, False)):
        budget = CompiledBudget()
        budget.begin("x", limit, LossMemory(batch=100, loss=500))
        caplog.clear()
        with caplog.at_level(logging.INFO):
            traced(model, budget)(x)
        assert (chosen(caplog) == [1.0]) is default


def test_what_the_loss_needs_is_counted():
    """Outside the model: the gradient of its outputs, and what the loss itself computes."""
    model, x = built()
    loss = loss_memory(Skeleton(model, squared, CPU), x, contextlib.nullcontext())
    outputs = x.nbytes  # as large as the inputs
    assert loss.batch == x.nbytes
    counter, leaf = LiveTensors(), model(x).detach().requires_grad_()
    counter.register({MemoryKind.BATCH: [leaf]})
    with counter:
        leaf.square().sum().backward()
    assert loss.loss == counter.peak - leaf.nbytes >= outputs


def test_a_limit_that_shrinks_below_what_is_needed_compiles_anew():
    model, x = built()
    budget = CompiledBudget()
    budget.begin("x", 10**6)
    traced(model, budget)(x)
    for limit, edition in ((10**7, 0), (10**6, 0), (500_000, 0), (30_000, 1), (30_000, 1)):
        budget.begin("x", limit)
        assert budget.edition == edition


def test_another_edition_is_another_graph():
    """Compiled code depends on it, as on the shape."""
    counted = []

    def counting(graph, inputs):
        counted.append(graph)
        return graph.forward

    model, x = built()
    budget = Budget(model, squared, ActivationCheckpointing(mode="budget", bytes="1MiB"), CPU, compiles=True)
    torch.compiler.reset()
    function = torch.compile(model, backend=counting, dynamic=False)
    for edition, size, graphs in ((0, 32, 1), (0, 32, 1), (1, 32, 2), (1, 16, 3), (0, 32, 3)):
        budget._chosen.edition = edition
        function(x[:size])
        assert len(counted) == graphs
    operations = {str(node.target) for node in counted[0].graph.nodes}
    assert not any("checkpoint" in name for name in operations)  # the blocks leave it to the compiler


# Runs


@pytest.fixture
def doubling():
    """A compiled function, and the list of graphs that have been compiled."""
    graphs = []

    def counting(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    return torch.compile(lambda x: x * 2, backend=counting), graphs


def test_what_is_first_called_while_memory_is_counted_is_compiled_later(doubling):
    (compiled, graphs), x = doubling, torch.ones(3)
    memory = CpuMemory(CPU, Memory())
    memory.compiles = True
    with memory.watch({}):
        compiled(x)
    assert not graphs
    assert memory.watched_peak == x.nbytes  # the counter sees all
    compiled(x)
    assert len(graphs) == 1
    with memory.watch({}):
        compiled(x)
    assert memory.watched_peak == x.nbytes


def test_what_a_model_compiles_itself_never_changes_from_step_to_step(doubling):
    (compiled, graphs), x = doubling, torch.ones(3)
    memory = CpuMemory(CPU, Memory())  # of a run without train.compile
    with memory.watch({}):
        compiled(x)
    graphs.clear()  # the counter's own handler
    compiled(x)
    with memory.watch({}):
        compiled(x)
    assert memory.watched_peak == x.nbytes
    assert not graphs


def test_torch_alone_would_never_compile_it(doubling):
    (compiled, graphs), x = doubling, torch.ones(3)
    with LiveTensors():
        compiled(x)
    graphs.clear()  # the handler of the mode
    compiled(x)
    assert not graphs


@pytest.mark.parametrize("mode", ["none", "full", "selective"])
def test_other_modes_compile(mode):
    """In one graph, which has the checkpoints; torch refuses the context that checkpoints have by default."""
    model, x = built()
    expected, _ = backward(model, model, x)
    activation_checkpointing.apply(model, ActivationCheckpointing(mode=mode))
    torch.compiler.reset()
    graphs = []

    def noting(graph, inputs):
        graphs.append(graph)
        return aot_eager(graph, inputs)

    aot_eager = lookup_backend("aot_eager")
    function = torch.compile(model, backend=noting, fullgraph=True)
    assert runs.relative_error(backward(model, function, x)[0], expected) < 1e-6
    operations = [str(node.target) for node in graphs[0].graph.nodes]
    assert any("checkpoint" in name for name in operations) is (mode != "none")


def test_several_ranks_of_fsdp_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"with train.compile=true and parallel=fsdp: FSDP has torch compile each"):
        runs.prepare(tmp_path, *GPT, "activation_checkpointing=budget", "parallel=fsdp")


class Steps:
    """The steps of a run, and what each of them saved for backward."""

    def __init__(self, folder, *overrides):
        self.run = runs.prepare(folder, *GPT, *overrides)
        model = self.run.state.model
        self.own = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
        self.stored, self.saved = {}, []
        self.hooks = self.pack, lambda tensor: tensor  # compiled code depends on which ones these are

    def pack(self, tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in self.own:
            self.stored[storage._cdata] = storage.nbytes()
        return tensor

    def take(self, count):
        for _ in range(count):
            self.stored.clear()
            with torch.autograd.graph.saved_tensors_hooks(*self.hooks):
                runs.loop.train_step(self.run)
            self.saved.append(sum(self.stored.values()))
        return runs.weights(self.run.state.model)


@pytest.mark.slow
@needs_a_compiler
def test_a_compiled_run_saves_less_and_trains_alike(tmp_path, caplog):
    overrides = ("model.dropout=0.1",)
    torch.compiler.reset()
    plain = Steps(tmp_path / "plain", *overrides)
    expected = plain.take(5)
    torch.compiler.reset()
    within = ("activation_checkpointing=budget", "activation_checkpointing.bytes=100KiB")
    budget = Steps(tmp_path / "budget", *overrides, *within)
    with caplog.at_level(logging.INFO):
        found = budget.take(5)
    (share,) = chosen(caplog)
    assert 0 < share < 1
    assert budget.saved[4] < plain.saved[4]
    assert runs.relative_error(found, expected) < 1e-5
    torch.compiler.reset()
    other = Steps(tmp_path / "other", *overrides, "train.seed=1")
    assert runs.relative_error(other.take(5), expected) > 1e-3
    for steps in (plain, budget, other):
        steps.run.close()
