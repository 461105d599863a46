"""Checkpointing by budget: what the blocks keep stays within so many bytes, and is what is dearest to recompute."""

import contextlib
import itertools
import logging
import random

import own_tasks
import pytest
import runs
import torch
from torch import nn

from trainapp.config.schema import ActivationCheckpointing
from trainapp.errors import UserError
from trainapp.memory.kinds import MemoryKind
from trainapp.memory.live_tensors import LiveTensors
from trainapp.techniques import budget as levers_budget
from trainapp.techniques import choice, costs
from trainapp.techniques.block_trace import BlockCall, Skeleton
from trainapp.techniques.budget import Budget, NoBudget
from trainapp.techniques.choice import choose, least, options_of
from trainapp.train import loop

CPU = torch.device("cpu")
GPT = (
    *("model=gpt", "model.depth=3", "model.width=32", "model.heads=2", "model.context_length=32"),
    *("data=synthetic_tokens", "data.vocab_size=64", "data.size=200", "checkpointing=off"),
)


@pytest.fixture
def free_selection(monkeypatch):
    """Otherwise it is not worth keeping a part of blocks as small as these."""
    monkeypatch.setattr(choice, "SELECTION", 0)
    monkeypatch.setattr(costs, "OPERATION", 0)


class Noise(nn.Module):
    def forward(self, x):
        return x * torch.rand_like(x)


class Mlp(nn.Module):
    """Blocks that widen to `width`, with an activation in place, and draw twice."""

    def __init__(self, depth=3, width=64):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, width), nn.ReLU(inplace=True), Noise(), nn.Linear(width, 16), Noise())
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


def budgeted(model, size, task=squared, **more):
    return Budget(model, task, ActivationCheckpointing(mode="budget", bytes=size, **more), CPU)


def gradients(model, x):
    torch.manual_seed(1)
    model(x).square().sum().backward()
    return runs.gradients(model)


# The choice


def made_up_call(rng, block):
    sizes = [(rng.randint(1, 30), float(rng.randint(1, 50))) for _ in range(rng.randint(0, 4))]
    keepable = {(f"op{n}", 0): item for n, item in enumerate(sizes)}
    cost = sum(item[1] for item in sizes) + rng.randint(0, 20)
    saved = rng.randint(5, 60)
    return BlockCall(block, 0, inputs=rng.randint(1, 10), saved=saved, cost=cost, keepable=keepable)


@pytest.mark.parametrize("seed", range(30))
def test_near_the_best_of_all_combinations(seed, free_selection):
    rng = random.Random(seed)
    calls = [made_up_call(rng, block) for block in range(4)]
    options = [options_of(call) for call in calls]
    lowest, highest = least(calls), sum(own[-1].size for own in options)
    dearest = sum(own[0].cost for own in options)
    step = max((a.cost - b.cost for own in options for a, b in itertools.pairwise(own)), default=0.0)
    for budget in range(lowest, highest + 10, 7):
        chosen = choose(calls, budget)
        assert sum(option.size for option in chosen) <= budget
        fitting = [c for c in itertools.product(*options) if sum(option.size for option in c) <= budget]
        best = min(sum(option.cost for option in combination) for combination in fitting)
        assert best <= sum(option.cost for option in chosen) <= min(dearest, best + 2 * step)


def test_too_little_is_the_least_and_enough_recomputes_nothing(free_selection):
    calls = [made_up_call(random.Random(n), n) for n in range(5)]
    assert [option.size for option in choose(calls, 0)] == [options_of(call)[0].size for call in calls]
    assert sum(option.cost for option in choose(calls, 10**6)) == 0


def test_later_blocks_of_a_kind_keep_more():
    calls = [BlockCall(block, 0, inputs=1, saved=10, cost=5.0) for block in range(4)]
    assert [option.size for option in choose(calls, 22)] == [1, 1, 10, 10]


# What is recorded


def test_what_a_block_saves_is_counted_as_it_is_saved():
    """The bytes of a real forward, beside what exists anyway."""
    model, x = Mlp(), torch.randn(8, 16)
    calls = Skeleton(model, squared, CPU).calls(x, contextlib.nullcontext(), every=1)
    counter = LiveTensors()
    counter.register({MemoryKind.PARAMETERS: model.parameters(), MemoryKind.BATCH: [x]})
    before = counter.live - x.untyped_storage().nbytes()
    with counter:
        hidden = model.layers[0](x)
    made = counter.live - before - hidden.untyped_storage().nbytes()
    assert calls[0].saved == made
    assert [(call.block, call.number) for call in calls] == [(0, 0), (1, 0), (2, 0)]


def test_nothing_is_kept_that_is_drawn_or_written_in_place():
    model, x = Mlp(), torch.randn(8, 16)
    (call, *_) = Skeleton(model, squared, CPU).calls(x, contextlib.nullcontext(), every=1)
    names = [func.overloadpacket.__name__ for func, _ in call.keepable]
    assert "addmm" in names  # the second one; the first is written by ReLU
    assert names.count("addmm") == 1
    assert not {"rand_like", "relu_"} & set(names)


# Results and memory


@pytest.mark.parametrize("size", [1, 2000, 4000, 8000, 10**6])
def test_gradients_are_those_of_none(size, free_selection):
    torch.manual_seed(0)
    plain, x = Mlp(), torch.randn(8, 16)
    expected = gradients(plain, x)
    torch.manual_seed(0)
    model = Mlp()
    budget = budgeted(model, size)
    budget.prepare(x, contextlib.nullcontext())
    assert torch.equal(gradients(model, x), expected)


def test_keeping_what_is_drawn_would_change_them(free_selection, monkeypatch):
    """The comparison above can fail: a recomputation that skips the first draw draws its numbers for the second."""
    monkeypatch.setattr("trainapp.techniques.block_trace.draws", lambda *_: False)
    torch.manual_seed(0)
    plain, x = Mlp(width=8), torch.randn(8, 16)  # the smaller one of the two draws is the first
    expected = gradients(plain, x)
    found = []
    for size in range(1500, 6000, 250):
        torch.manual_seed(0)
        model = Mlp(width=8)
        budget = budgeted(model, size)
        budget.prepare(x, contextlib.nullcontext())
        found.append(torch.equal(gradients(model, x), expected))
    assert not all(found)


@pytest.mark.parametrize("size", [3000, 5000, 8000, 12000])
def test_the_budget_holds_between_forward_and_backward(size, free_selection):
    model, x = Mlp(depth=4), torch.randn(8, 16)
    budget = budgeted(model, size)
    budget.prepare(x, contextlib.nullcontext())
    kept = sum(option.size for option in budget._chosen._choice.values())
    counter = LiveTensors()
    counter.register({MemoryKind.PARAMETERS: model.parameters(), MemoryKind.BATCH: [x]})
    before = counter.live - x.untyped_storage().nbytes()
    with counter:
        y = model(x)
    states = 4 * torch.get_rng_state().nbytes  # of every recomputed block, to draw the same numbers again
    own = counter.live - before - y.untyped_storage().nbytes()
    assert own - states <= kept <= size
    assert own >= kept


def measured(folder, *overrides):
    run = runs.prepare(folder, *GPT, *overrides, "batch.micro_size=8")
    for _ in range(2):
        runs.loop.train_step(run)
    weights = torch.cat([p.detach().flatten() for p in run.state.model.parameters()])
    run.close()
    return run.memory.peak, weights


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_runs_keep_less_for_less_and_end_alike(tmp_path, precision, free_selection):
    chosen = (f"precision={precision}", "model.dropout=0.1")
    most, expected = measured(tmp_path, *chosen)
    full, _ = measured(tmp_path, *chosen, "activation_checkpointing=full")
    budget = (*chosen, "activation_checkpointing=budget")
    peaks = []
    for size in ("1", "200KiB", "400KiB", "1GiB"):
        peak, weights = measured(tmp_path, *budget, f"activation_checkpointing.bytes={size}")
        assert torch.equal(weights, expected)
        peaks.append(peak)
    assert peaks[0] == full
    assert peaks[-1] == most
    assert peaks == sorted(set(peaks))


@pytest.mark.slow
def test_auto_uses_what_the_limit_leaves(tmp_path, free_selection):
    full, expected = measured(tmp_path, "activation_checkpointing=full")
    most, _ = measured(tmp_path)
    limit = (full + most) // 2
    peak, weights = measured(tmp_path, "activation_checkpointing=budget", f"memory.limit={limit}")
    assert full + 0.6 * (limit - full) < peak <= limit
    assert torch.equal(weights, expected)


@pytest.mark.parametrize("share", [0.2, 0.9])
def test_auto_uses_what_the_limit_leaves_beside_many_logits(tmp_path, free_selection, share):
    """The step keeps no logits for metrics through the backward, so the trace must not, either."""
    logits = ("model.depth=6", "data.vocab_size=1024", "every.log=1")
    full, expected = measured(tmp_path, *logits, "activation_checkpointing=full")
    most, _ = measured(tmp_path, *logits)
    limit = full + int(share * (most - full))
    peak, weights = measured(tmp_path, *logits, "activation_checkpointing=budget", f"memory.limit={limit}")
    assert 0.97 * limit < peak <= limit
    assert torch.equal(weights, expected)


@pytest.mark.parametrize("room", [90, 130, 299])
def test_a_guess_that_peaks_too_high_is_followed_by_smaller_ones(monkeypatch, room):
    """Where a byte more that is kept costs two at the peak."""
    traced = []

    def peak(kept, *_):
        traced.append(kept)
        return 2 * kept

    monkeypatch.setattr(levers_budget, "choose", lambda calls, size: size)
    monkeypatch.setattr(levers_budget, "_by_call", lambda calls, size: size)
    monkeypatch.setattr(levers_budget, "peak_with", peak)
    found = budgeted(Mlp(), "auto")._largest_within(room, None, [BlockCall(0, 0, 10, 1000, cost=1.0)], None, None, True)
    assert 0.85 * room < 2 * found <= room
    assert len(traced) <= levers_budget.MOST_TRACES


@pytest.mark.slow
def test_auto_leaves_what_the_task_keeps_between_steps(tmp_path, free_selection):
    """The limit is just above what `full` needs: what the task keeps must not be given to the blocks."""
    own = ("user_packages=[own_tasks]", "task=own_tasks.Bank")
    full, expected = measured(tmp_path, *own, "activation_checkpointing=full")
    assert full > measured(tmp_path, "activation_checkpointing=full")[0] + 390_000
    limit = full + 50_000
    peak, weights = measured(tmp_path, *own, "activation_checkpointing=budget", f"memory.limit={limit}")
    assert full <= peak <= limit
    assert torch.equal(weights, expected)


def test_auto_without_a_limit_recomputes_nothing(tmp_path):
    assert measured(tmp_path, "activation_checkpointing=budget")[0] == measured(tmp_path)[0]


def test_every_second_block(tmp_path):
    overrides = ("activation_checkpointing=budget", "activation_checkpointing.bytes=1")
    peak, weights = measured(tmp_path, *overrides, "activation_checkpointing.every=2")
    assert peak == measured(tmp_path, "activation_checkpointing=full", "activation_checkpointing.every=2")[0]
    assert torch.equal(weights, measured(tmp_path)[1])


def test_the_copy_without_data_belongs_to_no_checkpoint(tmp_path):
    plain = runs.prepare(tmp_path, *GPT)
    run = runs.prepare(tmp_path, *GPT, "activation_checkpointing=budget")
    assert run.state.stateful.owners.keys() == plain.state.stateful.owners.keys()
    assert run.state.model.state_dict().keys() == plain.state.model.state_dict().keys()
    plain.close()
    run.close()


# What cannot be planned, or not done


def test_the_trace_leaves_the_tasks_globals_as_they_are(tmp_path):
    own = ("model._target_=own_tasks.Net", "user_packages=[own_tasks]", "task=own_tasks.with_globals", "data=digits")
    ends = []
    for mode in (("none",), ("budget", "activation_checkpointing.bytes=10KiB")):
        own_tasks.CALLS[:], own_tasks.LOGITS[:] = [0], []
        chosen = (*own, "train.check_loss=false")
        run = runs.prepare(tmp_path / mode[0], *chosen, f"activation_checkpointing={mode[0]}", *mode[1:])
        loop.train(run)
        run.close()
        assert own_tasks.CALLS == [4]
        ends.append(runs.weights(run.state.model))
    assert torch.equal(*ends)


class ReadsItself(Mlp):
    def forward(self, x):
        return super().forward(x[x.sum(1) > -1e9])  # a shape that depends on values


def test_a_model_that_cannot_be_traced_is_recomputed_with_one_warning(caplog):
    torch.manual_seed(0)
    plain, x = ReadsItself(), torch.randn(8, 16)
    expected = gradients(plain, x)
    torch.manual_seed(0)
    model = ReadsItself()
    budget = budgeted(model, 10**6)
    with caplog.at_level(logging.WARNING):
        for size in (8, 7):
            budget.prepare(x[:size], contextlib.nullcontext())
    budget.prepare(x, contextlib.nullcontext())
    assert torch.equal(gradients(model, x), expected)
    (message,) = [record.message for record in caplog.records]
    assert "cannot be traced (DynamicOutputShapeException" in message
    assert "as with activation_checkpointing=full" in message


def test_a_budget_below_what_the_blocks_need_is_said_once(tmp_path, caplog):
    run = runs.prepare(tmp_path, *GPT, "activation_checkpointing=budget", "activation_checkpointing.bytes=1000")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            runs.loop.train_step(run)
    run.close()
    (message,) = [record.message for record in caplog.records if "bytes=1000" in record.message]
    assert "leaves 1000 B, but these blocks keep at least" in message


def test_auto_with_room_for_the_least_does_not_warn(tmp_path, caplog, free_selection):
    """Where nothing fits but the inputs of the blocks, they are what is kept."""
    full, _ = measured(tmp_path, "activation_checkpointing=full")
    with caplog.at_level(logging.WARNING):
        peak, _ = measured(tmp_path, "activation_checkpointing=budget", f"memory.limit={full + 1000}")
    assert peak == full
    assert not [record.message for record in caplog.records if "keep at least" in record.message]


def test_no_budget_wants_nothing():
    NoBudget().prepare({"x": torch.ones(1)}, contextlib.nullcontext())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("activation_checkpointing.bytes=0.5",),
            "activation_checkpointing.bytes=0.5: must be 'auto' or bytes, or a size",
        ),
        (("activation_checkpointing.bytes=0",), "activation_checkpointing.bytes=0: must be 'auto' or bytes, or a size"),
    ],
)
def test_refusals(tmp_path, overrides, message):
    with pytest.raises(UserError) as refused:
        runs.prepare(tmp_path, *GPT, "activation_checkpointing=budget", *overrides)
    assert str(refused.value).startswith(message)


def test_a_model_without_blocks_is_refused():
    with pytest.raises(UserError, match="Linear does not say what its blocks are"):
        budgeted(nn.Linear(2, 2), 10)
