"""Random numbers that belong to samples: the same for every cut, distributed as torch's, and torch's own elsewhere."""

import logging
import math
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from trainapp.draws.counter_based import BLOCK
from trainapp.draws.layout import interleaved_layouts, layouts_by_shape
from trainapp.draws.random_operations import OPERATIONS
from trainapp.draws.record import DrawRecord
from trainapp.draws.sample_draws import SampleDraws

BATCH = 12
CUTS = ([12], [5, 7], [4, 4, 4], [1] * 12)
D = torch.distributions


def pieces(cut):
    """The positions of each micro-batch."""
    ends = torch.tensor(cut).cumsum(0).tolist()
    return [range(end - size, end) for end, size in zip(ends, cut, strict=True)]


def learnt(forward):
    """A draw_record, from batches of four samples and of two."""
    logs = [{}, {}]
    for log, size in zip(logs, (4, 2), strict=True):
        with SampleDraws((0, 0), range(size), DrawRecord(), "train", log):
            forward(torch.arange(size))
    return DrawRecord({"train": layouts_by_shape(*logs, 4, 2)})


def drawn(forward, cut, draw_record=None, key=(0, 1)):
    """What `forward(positions)` returns for the samples of all micro-batches."""
    found = []
    for positions in pieces(cut):
        with SampleDraws(key, positions, draw_record or DrawRecord(), "train"):
            found.append(forward(torch.tensor(list(positions))))
    return torch.cat(found).double()


def of_torch(forward, cut):
    """The same by torch's own generator, as seeded for a step."""
    torch.manual_seed(1)
    return torch.cat([forward(torch.tensor(list(positions))) for positions in pieces(cut)]).double()


# --- the same for every cut

X, IMAGES = torch.randn(BATCH, 6, 8), torch.randn(BATCH, 3, 8, 8)
HEADS, P = torch.randn(BATCH, 2, 6, 4), torch.rand(BATCH, 5) * 0.8 + 0.1
attention, attention_first = (nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=first) for first in (True, False))
lstm, lstm_first = (nn.LSTM(8, 8, 2, dropout=0.3, batch_first=first) for first in (True, False))


def empty(i, *shape):
    return torch.empty(len(i), *shape)


KINDS = {
    "dropout": lambda i: F.dropout(X[i], 0.3),
    "rare dropout": lambda i: F.dropout(X[i], 0.01),
    "dropout2d": lambda i: F.dropout2d(IMAGES[i], 0.3),
    "alpha_dropout": lambda i: F.alpha_dropout(X[i], 0.3, True),
    "native_dropout": lambda i: torch.native_dropout(X[i], 0.3, True)[0],
    "attention": lambda i: attention(X[i], X[i], X[i])[0],
    "attention, time first": lambda i: attention_first(*[X[i].transpose(0, 1)] * 3)[0].transpose(0, 1),
    "scaled_dot_product_attention": lambda i: F.scaled_dot_product_attention(*[HEADS[i]] * 3, dropout_p=0.3),
    "lstm": lambda i: lstm(X[i])[0],
    "lstm, time first": lambda i: lstm_first(X[i].transpose(0, 1))[0].transpose(0, 1),
    "flattened tokens": lambda i: F.dropout(X[i].reshape(-1, 8), 0.3).view(-1, 6, 8),
    "flattened tokens, time first": lambda i: (
        F.dropout(X[i].transpose(0, 1).reshape(-1, 8), 0.3).view(6, -1, 8).transpose(0, 1)
    ),
    "two views": lambda i: torch.stack(F.dropout(torch.cat([X[i], X[i]]), 0.3).chunk(2), 1),
    "stochastic depth": lambda i: empty(i, 1, 1).bernoulli_(0.7),
    "last dimension": lambda i: torch.randn(3, len(i)).t(),
    "transposed": lambda i: torch.empty(BLOCK["cpu"] + 9, len(i)).t().normal_(),
    "longer than a block": lambda i: torch.randn(len(i), BLOCK["cpu"] + 9),
    "rand": lambda i: torch.rand(len(i), 1, 1),
    "randn": lambda i: torch.randn(len(i), 3),
    "one randn": lambda i: torch.randn(len(i), 1),
    "a pair of randn": lambda i: torch.randn(len(i), 2),
    "randn in bf16": lambda i: torch.randn(len(i), 3, dtype=torch.bfloat16),
    "randn in fp64": lambda i: torch.randn(len(i), 3, dtype=torch.float64),
    "complex randn": lambda i: torch.view_as_real(torch.randn(len(i), 3, dtype=torch.complex64)),
    "rand_like": lambda i: torch.rand_like(X[i]),
    "randint": lambda i: torch.randint(5, 1000, (len(i),)),
    "random_": lambda i: empty(i, 3).random_(),
    "random_, from": lambda i: torch.empty(len(i), 3, dtype=torch.int64).random_(5, None),
    "normal": lambda i: torch.normal(X[i], X[i].abs()),
    "normal, out": lambda i: torch.normal(X[i], X[i].abs(), out=torch.empty(0)),
    "normal, number": lambda i: torch.normal(0.0, X[i].abs()),
    "uniform_": lambda i: empty(i, 3).uniform_(-1, 1),
    "exponential_": lambda i: empty(i, 3).exponential_(),
    "cauchy_": lambda i: empty(i, 3).cauchy_(),
    "geometric_": lambda i: empty(i, 3).geometric_(0.3),
    "log_normal_": lambda i: empty(i, 3).log_normal_(),
    "bernoulli": lambda i: torch.bernoulli(P[i]),
    "bernoulli, out": lambda i: torch.bernoulli(P[i], out=torch.empty(0)),
    "bernoulli_": lambda i: empty(i, 5).bernoulli_(P[i]),
    "multinomial": lambda i: torch.multinomial(P[i], 3),
    "multinomial, out": lambda i: torch.multinomial(P[i], 3, out=torch.empty(0, dtype=torch.int64)),
    "gumbel_softmax": lambda i: F.gumbel_softmax(X[i]),
    "rrelu": lambda i: F.rrelu(X[i], training=True),
    "rrelu_": lambda i: torch.rrelu_(X[i] * 1, training=True),
    "poisson": lambda i: torch.poisson(P[i] * 9),
    "binomial": lambda i: torch.binomial(torch.full_like(P[i], 9), P[i]),
    "fractional_max_pool2d": lambda i: F.fractional_max_pool2d(IMAGES[i], 2, output_size=5),
    "Normal": lambda i: D.Normal(X[i], 1.0).rsample(),
    "Normal, samples first": lambda i: D.Normal(X[i], 1.0).rsample((5,)).transpose(0, 1),
    "Categorical": lambda i: D.Categorical(P[i]).sample(),
    "Gamma": lambda i: D.Gamma(P[i], P[i]).rsample(),
    "Beta": lambda i: D.Beta(P[i], P[i]).rsample(),
    "Dirichlet": lambda i: D.Dirichlet(P[i]).rsample(),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_draw_is_the_samples_own(kind):
    """However the batch is cut; another one in the next draw and in the next step; torch's own depends on the cut."""

    def forward(i):
        return torch.cat([KINDS[kind](i).reshape(len(i), -1) for _ in range(2)], 1)

    draw_record, atol = learnt(forward), 1e-6  # matmuls round by batch size
    if kind in ("two views", "flattened tokens, time first"):  # which the shapes do not tell
        assert not torch.allclose(drawn(forward, [12], draw_record), drawn(forward, [5, 7], draw_record), atol=atol)
        draw_record = apart(draw_record)
    whole = drawn(forward, [12], draw_record)
    for cut in CUTS[1:]:
        assert torch.allclose(drawn(forward, cut, draw_record), whole, atol=atol), cut
    assert not draw_record.depends
    first, second = whole.chunk(2, 1)
    assert not torch.equal(first, second)
    assert not torch.allclose(drawn(forward, [12], draw_record, (0, 2)), whole, atol=atol)
    assert not torch.allclose(of_torch(forward, [12]), of_torch(forward, [5, 7]), atol=atol)


def apart(draw_record):
    """The other layout for all draws with several rows per sample."""
    return DrawRecord({"train": interleaved_layouts(draw_record.layouts["train"])})


def test_every_kernel_that_draws_is_covered():
    """By a kernel here, or by an operation that is made of them: what is not replaced on the CPU is composite."""
    known = {
        "_fused_sdp_choice",  # draws nothing
        "_scaled_dot_product_flash_attention_for_cpu",  # not chosen with dropout
        "native_dropout",  # calls bernoulli_
    }
    uncovered = set()
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("aten::") and torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU"):
            base, _, overload = name.removeprefix("aten::").partition(".")
            operator = getattr(getattr(torch.ops.aten, base), overload or "default")
            if torch.Tag.nondeterministic_seeded in operator.tags:
                uncovered.add(name.removeprefix("aten::"))
    assert uncovered - set(OPERATIONS) == known


def test_a_draw_without_the_samples_is_the_same_in_all_micro_batches():
    def forward(i):
        return torch.randn(3).expand(len(i), 3) + torch.randperm(3)

    whole = drawn(forward, [12], learnt(forward))
    assert torch.equal(drawn(forward, [5, 7], learnt(forward)), whole)
    assert not torch.equal(drawn(forward, [12], learnt(forward), (0, 2)), whole)


def test_what_mixes_samples_is_drawn_per_micro_batch_and_noted():
    """Not the same numbers in every micro-batch."""

    def forward(i):
        return torch.stack([torch.randperm(len(i)), torch.multinomial(torch.ones(50), len(i))], 1)

    draw_record = learnt(forward)
    halves = drawn(forward, [6, 6], draw_record)
    assert not torch.equal(halves[:6], halves[6:])
    assert set(draw_record.depends) == {"draws of randperm.generator_out", "draws of multinomial"}


def test_a_forward_that_draws_a_varying_number_of_times_is_noted():
    def forward(i):
        if len(i) == 5:
            torch.rand(len(i), 2)
        return torch.randn(len(i), 3)

    draw_record = learnt(forward)
    assert not torch.equal(drawn(forward, [12], draw_record), drawn(forward, [5, 7], draw_record))
    assert "uniform_ of [5, 2]" in draw_record.depends["number of draws"]
    drawn(forward, [12], unnoted := learnt(forward))
    assert not unnoted.depends


@pytest.mark.parametrize("draw", [torch.randn, torch.rand, lambda *shape: torch.empty(shape).bernoulli_(0.4)])
def test_padding_changes_nothing_before_it(draw):
    """Of waveforms, hidden states and the weights of attention."""

    def padded(length):
        with SampleDraws((0, 1), range(3), DrawRecord(), "train"):
            return draw(3, length), draw(3, length, 5), draw(3, 2, length, length)

    for short, long in zip(padded(7), padded(12), strict=True):
        kept = tuple(map(slice, short.shape))
        assert torch.equal(short, long[kept])
        assert not torch.equal(short.flatten(), long.flatten()[: short.numel()]) or short.ndim == 1


def test_without_a_record_an_axis_of_the_batchs_size_is_that_of_the_samples():
    """Which is why it is learnt: sequences of twelve, time first, have two such axes."""

    def forward(i):
        return F.dropout(torch.ones(12, len(i)), 0.5).t()

    assert torch.equal(drawn(forward, [12], learnt(forward)), drawn(forward, [5, 7], learnt(forward)))
    assert not torch.equal(drawn(forward, [12]), drawn(forward, [5, 7]))


def test_alike_draws_are_the_same_for_each_sample():
    """Whichever rows are whose."""
    draw_record = learnt(KINDS["two views"])
    with SampleDraws((0, 1), range(4), draw_record, "train", alike=True):
        masks = F.dropout(torch.ones(8, 6, 8), 0.3)
    assert torch.equal(masks, masks[:1].expand(8, 6, 8))
    assert 0 < (masks[0] == 0).sum() < 48


# --- recomputation, and what else handles generators


class Block(nn.Module):
    """Dropout, noise and a second dropout, checkpointed or not. how: arguments of torch's `checkpoint`."""

    def __init__(self, how=None):
        super().__init__()
        torch.manual_seed(3)
        self.layer, self.how = nn.Linear(8, 8).double(), how

    def body(self, x):
        return F.dropout(self.layer(x + torch.randn_like(x)), 0.3)

    def forward(self, x):
        x = F.dropout(x, 0.3) if self.how is None or "first" not in self.how else x
        how = {k: v for k, v in (self.how or {}).items() if k != "first"}
        x = self.body(x) if self.how is None else checkpoint(self.body, x, **how)
        return F.dropout(x, 0.3)


def gradient(model, cut, is_outside=False):
    inputs = torch.arange(96, dtype=torch.float64).view(12, 8).requires_grad_()
    model.zero_grad()
    for positions in pieces(cut):
        with SampleDraws((0, 1), positions, DrawRecord(), "train"):
            loss = model(inputs[positions]).square().sum()
            if not is_outside:
                loss.backward()
        if is_outside:
            loss.backward()
    return model.layer.weight.grad.clone()


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputation_draws_what_its_forward_drew(reentrant):
    plain, checkpointed = gradient(Block(), [12]), {"use_reentrant": reentrant}
    for cut in CUTS:
        assert torch.allclose(gradient(Block(checkpointed), cut), plain, rtol=1e-10), cut
    assert not torch.allclose(gradient(Block(checkpointed), [12], is_outside=True), plain, rtol=1e-3)
    careless = Block(checkpointed | {"preserve_rng_state": False})
    assert not torch.allclose(gradient(careless, [12]), plain, rtol=1e-3)


@pytest.mark.parametrize("manner", ["manual_seed", "fork_rng", "both"])
def test_a_forward_may_seed_or_fork_the_generator(manner):
    def forward(i):
        if manner == "manual_seed":
            torch.manual_seed(5)
            return torch.rand(len(i), 2)
        with torch.random.fork_rng():
            if manner == "both":
                torch.manual_seed(5)
            first = torch.rand(len(i), 2)
        return torch.cat([first, torch.rand(len(i), 2)], 1)

    draw_record, before = learnt(forward), torch.default_generator.get_state()
    whole = drawn(forward, [12], draw_record)
    assert all(torch.equal(drawn(forward, cut, draw_record), whole) for cut in CUTS)
    assert not draw_record.depends
    assert torch.equal(torch.default_generator.get_state(), before)
    is_seeded = manner != "fork_rng"
    assert torch.equal(drawn(forward, [12], draw_record, (0, 2))[:, :2], whole[:, :2]) == is_seeded


def test_a_hook_that_logs_in_the_backward_does_not_change_a_recomputation(caplog):
    """Logging makes autograd's thread one that Python knows."""
    model = Block({"use_reentrant": False})
    plain = gradient(model, [12])
    model.layer.weight.register_hook(lambda gradient: logging.getLogger("own").warning("hook"))
    assert torch.equal(gradient(model, [12]), plain)
    assert "hook" in caplog.text


def test_outside_of_a_drawing_torch_draws_its_own():
    """Numbers that torch 2.13 gives without trainapp; also in other threads, and from generators that are passed."""
    torch.manual_seed(7)
    expected = torch.tensor([0.5349, 0.1988, 0.6592])
    assert torch.allclose(torch.rand(3), expected, atol=1e-4)
    draw_record, elsewhere = DrawRecord(), []
    with SampleDraws((0, 1), range(3), draw_record, "train"):
        torch.manual_seed(7)
        thread = threading.Thread(target=lambda: elsewhere.append(torch.rand(3)))
        thread.start()
        thread.join()
        assert torch.allclose(elsewhere[0], expected, atol=1e-4)
        own = torch.Generator().manual_seed(7)
        assert torch.allclose(torch.rand(3, generator=own), expected, atol=1e-4)
        assert not draw_record.draws
        assert not torch.allclose(torch.rand(3), expected, atol=1e-2)
    assert set(draw_record.depends) == {"own generator"}


def test_an_error_restores_the_generator_and_keeps_its_class():
    before = torch.default_generator.get_state()
    with pytest.raises(ZeroDivisionError), SampleDraws((0, 1), range(3), DrawRecord(), "train"):
        1 / (torch.rand(3) > 2).sum().item()
    assert torch.equal(torch.default_generator.get_state(), before)
    assert SampleDraws.active is None
    with pytest.raises(RuntimeError, match="probability"), SampleDraws((0, 1), range(3), DrawRecord(), "train"):
        torch.multinomial(-torch.ones(3, 2), 1)


@pytest.mark.parametrize("shape", [(16, BLOCK["cpu"]), (16, 5000, 1), (16, 4, 40, 3)])
@pytest.mark.parametrize("kind", ["normal_", "uniform_", "exponential_", "bernoulli_"])
def test_the_scratch_of_a_draw_has_a_bound(kind, shape):
    """Per element of a block and per row, by torch's profiler of memory. No limit or plan counts it."""
    target = torch.empty(shape)
    with SampleDraws((0, 1), range(16), DrawRecord(), "train"):
        getattr(target, kind)()  # makes the table of steps
        with torch.profiler.profile(profile_memory=True) as profile:
            getattr(target, kind)()
    live = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    rows = math.prod(shape[:-1])
    assert 0 < peak <= 24 * min(target.numel(), BLOCK["cpu"]) + 32 * min(rows, BLOCK["cpu"]) + rows // 2
