"""The time of a traced step: operations are counted as known, and priced by what they take here."""

import time
import weakref
from dataclasses import replace

import pytest
import torch
from torch import nn

from trainapp.config.schema import ActivationCheckpointing
from trainapp.planning import operation_times, step_time
from trainapp.planning.operation import ATTENTION, MATMUL, operation_of
from trainapp.planning.step_time import Speeds
from trainapp.planning.step_work import MicroBatchWork, Work, WorkCounter
from trainapp.techniques import checkpointing
from trainapp.torch_private import fake_tensor_mode
from trainapp.train.phase import Phase


@pytest.fixture(scope="module")
def speeds():
    return Speeds(torch.device("cpu"))


def counted(function, phase=Phase.FORWARD):
    counter = WorkCounter(lambda: phase)
    with counter:
        function()
    return counter.work


def only(counts):
    ((operation, times),) = counts.items()
    return operation, times


def test_a_product_has_its_flops_and_its_bytes():
    a, b = torch.randn(30, 40), torch.randn(40, 50)
    operation, times = only(counted(lambda: [a @ b, a @ b]).per_micro_batch)
    assert (operation.kind, operation.work, times) == (MATMUL, 2 * 30 * 40 * 50, 2)
    assert operation.moved == 4 * (30 * 40 + 40 * 50 + 30 * 50)
    assert operation.allocates


def test_views_are_calls_that_move_nothing_and_metrics_cost_nothing():
    x = torch.randn(6, 4)
    work = counted(lambda: torch.ops.aten._unsafe_view(x.t()[1:], [3, 6]))
    assert not work.per_micro_batch
    assert work.traced[0].views == 3
    assert counted(lambda: x.t(), Phase.METRIC).traced[0].views == 0
    work = counted(lambda: x @ x.t(), Phase.METRIC)
    assert not work.per_micro_batch
    assert not work.per_step
    assert counted(lambda: x + x, Phase.CLIP).per_step


def test_what_is_written_in_place_is_read_and_written():
    x, y = torch.randn(100), torch.randn(100)
    assert only(counted(lambda: x.add_(y)).per_micro_batch)[0].moved == 3 * 400
    assert only(counted(lambda: x + y).per_micro_batch)[0].moved == 3 * 400
    assert only(counted(lambda: x.copy_(y)).per_micro_batch)[0].moved == 2 * 400
    assert not only(counted(lambda: x.add_(y)).per_micro_batch)[0].allocates


def test_an_operation_keeps_no_tensor_in_memory():
    written = torch.empty(4)
    alive = weakref.ref(written)
    operation = operation_of(torch.ops.aten.sqrt.out, (torch.ones(4),), {"out": written}, written)
    assert operation.call is not None
    del written
    assert alive() is None


def test_nor_a_storage():
    """Activation offload gives one to `set_`, which kept all that it moves in memory of the trace."""
    storage = torch.ones(4).untyped_storage()
    view = torch.empty(0)
    operation = operation_of(torch.ops.aten.set_.source_Storage, (view, storage), {}, view)
    assert operation.call is None


def test_gradients_without_a_layout_in_memory_are_operations_like_others():
    """Whose bytes depend on values."""
    table, numbers = nn.Embedding(50, 8, sparse=True), torch.tensor([1, 2, 2])
    counted(lambda: table(numbers).sum().backward(), Phase.BACKWARD)
    assert table.weight.grad.is_sparse
    work = counted(lambda: table(numbers).sum().backward(), Phase.BACKWARD).per_micro_batch  # adds to it
    assert all(operation.moved >= 0 for operation in work)
    assert any(operation.call is None for operation in work)


def test_a_slice_holds_all_that_it_spans(speeds, monkeypatch):
    """Run for real, with what lies between: FSDP's slices of what 512 ranks send would take 24 GiB."""
    with fake_tensor_mode():
        column = torch.empty(2**20, 2**10)[:, :2]
        operation = only(counted(lambda: column + 1).per_micro_batch)[0]
    assert operation.moved == 2 * 4 * 2 * 2**20
    assert operation.held == 4 * ((2**20 - 1) * 2**10 + 2) + 4 * 2 * 2**20
    monkeypatch.setattr(step_time, "in_turn", None)  # not called
    assert speeds.busy(operation) > 0


@pytest.mark.parametrize("backward", [False, True])
def test_attention_of_the_cpu_is_counted(backward):
    q = torch.randn(2, 3, 16, 8, requires_grad=backward)

    def attend():
        result = nn.functional.scaled_dot_product_attention(q, q, q)
        if backward:
            result.sum().backward()

    products = 2 + 5 * backward  # the backward recomputes the scores
    work = counted(attend).per_micro_batch
    assert sum(o.work for o in work if o.kind == ATTENTION) == products * 2 * 2 * 3 * 16 * 16 * 8


def test_tensors_without_data_are_counted_as_real_ones():
    def step():
        model = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 2))
        return counted(lambda: model(torch.ones(4, 8)).sum().backward())

    with fake_tensor_mode():
        fake = step()
    assert fake.per_micro_batch == step().per_micro_batch


def test_an_operation_takes_what_it_takes_on_its_own(speeds):
    """A large product against a small one, and both against the clock: within a factor of three on any machine."""
    small, large = torch.randn(64, 64), torch.randn(512, 512)
    seconds = [speeds.busy(only(counted(lambda x=x: x @ x).per_micro_batch)[0]) for x in (small, large)]
    assert seconds[1] > 20 * seconds[0]
    large @ large
    started = time.thread_time()
    for _ in range(5):
        large @ large
    assert seconds[1] == pytest.approx((time.thread_time() - started) / 5, rel=2.0)


@pytest.mark.parametrize("name", ["bucketize", "searchsorted"])
def test_a_search_is_timed_on_values_that_cannot_be_guessed(name):
    """On equal values it takes half as long."""
    search, values = getattr(torch.ops.aten, name).Tensor, torch.zeros(1000)
    args = (values, torch.zeros(255)) if name == "bucketize" else (torch.zeros(255), values)
    before = torch.get_rng_state()
    places = operation_of(search, args, {}, search(*args)).call(torch.device("cpu"))()
    assert len(places.unique()) > 200
    assert (torch.get_rng_state() == before).all()


def test_beyond_what_is_run_for_real_the_roofline_holds(speeds, monkeypatch):
    monkeypatch.setattr(speeds, "_largest", 0)
    n = 700
    x = torch.empty(n, n)
    operation = only(counted(lambda: x @ x).per_micro_batch)[0]
    each = 2 * n**3
    assert speeds.busy(operation) >= speeds.roofline(operation) > 0
    rate = each / speeds.roofline(operation)
    fixed, per_flop = speeds._of_arithmetic(MATMUL, torch.float32)
    assert rate == pytest.approx(each / (fixed + per_flop * each), rel=0.01)
    twice = torch.empty(n, 2 * n)
    wider = only(counted(lambda: x @ twice).per_micro_batch)[0]
    assert speeds.roofline(wider) == pytest.approx(2 * speeds.roofline(operation), rel=0.1)


def test_an_operation_costs_the_same_whenever_it_is_asked_for(speeds):
    x = torch.randn(300, 300)
    operation = only(counted(lambda: x @ x).per_micro_batch)[0]
    again = only(counted(lambda: x @ x).per_micro_batch)[0]
    assert operation == again
    assert speeds.busy(operation) == speeds.busy(again)


def test_operations_of_one_name_take_turns():
    """Each runs once per round, after the others: alone in a loop it would find everything in the caches."""
    order = []

    def recorded(number):
        x = torch.ones(number + 1)
        operation = only(counted(lambda: x + x).per_micro_batch)[0]
        return replace(operation, call=lambda device: lambda: order.append(number))

    operations = [recorded(number) for number in range(3)]
    seconds = operation_times.in_turn(operations, operation_times.Clock(torch.device("cpu")), set())
    assert set(seconds) == set(operations)
    assert order == [0, 1, 2] * (1 + operation_times.ROUNDS)  # the first round does not count


def test_an_operation_that_cannot_be_run_is_left_to_the_roofline(speeds):
    x = torch.ones(3, 5)
    operation = only(counted(lambda: x + x).per_micro_batch)[0]

    def fails(device):
        raise ValueError

    wrong = replace(operation, signature="wrong", call=fails)
    assert operation_times.in_turn([wrong], speeds.clock, set()) == {}
    assert speeds.busy(wrong) >= speeds.roofline(wrong) > 0


def test_what_is_out_of_the_caches_takes_longer(speeds):
    """Python and autograd after an operation that moves as much as the caches hold, against one that moves little."""
    little, much = torch.ones(8), torch.ones(operation_times.CACHES // 4)
    calls = [speeds.call(only(counted(lambda x=x: x + x).per_micro_batch)[0]) for x in (little, much)]
    assert 1e-7 < speeds.view <= calls[0] < calls[1] < 1e-2


def test_micro_batches_that_were_not_traced_count(speeds):
    x = torch.randn(64, 64)
    work = counted(lambda: x @ x)
    operation = only(work.per_micro_batch)[0]
    one, call = work.seconds(speeds), speeds.call(operation)
    work.share, work.micro_batches = 0.25, 4  # of four, one was traced
    assert work.seconds(speeds) == pytest.approx(4 * one)
    assert work.seconds(speeds, micro_batches=1) == pytest.approx(4 * one - 3 * call)
    update = Work(per_step=work.per_micro_batch, share=0.25, micro_batches=4)
    assert update.seconds(speeds) == pytest.approx(one)  # once per step, however many there are


def test_later_micro_batches_are_like_the_last_traced_one(speeds):
    """The first has no gradients to add to."""
    x = torch.randn(64, 64)
    first = counted(lambda: x @ x)
    one = first.seconds(speeds)
    two = Work(
        [MicroBatchWork(counts) for counts in (first.per_micro_batch, first.per_micro_batch + first.per_micro_batch)]
    )
    two.share, two.micro_batches = 0.5, 4
    assert two.seconds(speeds) == pytest.approx((1 + 3 * 2) * one)


def test_micro_batches_are_told_apart():
    phases = [Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.FORWARD, Phase.BACKWARD, Phase.CLIP]
    x, phase = torch.randn(4, 4), [Phase.START]
    counter = WorkCounter(lambda: phase[0])
    with counter:
        for phase[0] in phases:
            x + x
            x.t()
    assert [(one.operations.total(), one.views) for one in counter.work.traced] == [(3, 3), (2, 2)]
    assert sum(counter.work.per_step.values()) == 1


@pytest.mark.parametrize("mode", ["none", "full", "selective"])
def test_checkpointed_blocks_cost_the_python_around_their_operations(speeds, mode):
    """All of a block's forward, and of its recomputation; `selective` also decides about each result."""
    model, x, phase = nn.Module(), torch.randn(4, 8, requires_grad=True), [Phase.FORWARD]
    blocks = model.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.SiLU()) for _ in range(3))
    model.blocks = lambda: [*blocks]
    checkpointing.apply(model, ActivationCheckpointing(mode=mode))
    counter = WorkCounter(lambda: phase[0])
    with counter:
        for block in blocks:
            x = block(x)
        (work,) = counter.work.traced
        first = {selective: counts.total() for selective, counts in work.in_blocks.items()}
        phase[0] = Phase.BACKWARD
        x.sum().backward()
    selective, inside = mode == "selective", 3 * 2 * (mode != "none")  # two in each of three blocks
    assert first == {selective: inside, not selective: 0}
    assert work.blocks[selective] == 3 * (mode != "none")
    assert inside <= work.in_blocks[selective].total() <= 2 * inside  # less by what is kept
    assert not work.in_blocks[not selective]
    counters = checkpointing.CheckpointCounters
    assert counters.inside == counters.selecting == 0
    plain = Work([replace(work, in_blocks={})])
    assert (counter.work.seconds(speeds) > plain.seconds(speeds)) == (mode != "none")


def test_selecting_costs_more_than_recomputing_all(speeds):
    """Per operation of a block; blocks cost something either way."""
    full, selective = (speeds.delay(0, chosen) for chosen in (False, True))
    assert 1e-6 < full.operation < selective.operation < 1e-3
    assert 1e-5 < full.block < 1e-2
