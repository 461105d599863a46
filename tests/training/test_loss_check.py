"""Before the first step, the loss of a few samples is compared with those of their halves: no trace, no false alarm."""

import functools
import multiprocessing
import queue
import random
import re

import numpy as np
import own_streams
import own_tasks
import pytest
import runs
import torch
from torch import nn
from torch.nn import functional as F

from trainapp.data.joining import batch_dims, join_parts
from trainapp.data.sets.digits import Digits
from trainapp.draws.record import EVALUATION, DrawRecord
from trainapp.errors import UserError
from trainapp.losses import losses
from trainapp.optim.emulated_kernels import install_for
from trainapp.trials.comparison import Comparison, Defect, DefectKind, SplitResults
from trainapp.trials.messages import Refused
from trainapp.trials.modes import Mode
from trainapp.trials.operations import Observer, RandomRounding
from trainapp.trials.parts import compare_with_parts
from trainapp.trials.precisions import ProbeFactory, first_working_result, probe_in_fp64
from trainapp.trials.probe import ProbeInputs, Sums, TaskProbe
from trainapp.trials.samples import first_samples

PACKAGES = "user_packages=[own_tasks,own_streams,test_loss_check]"
UNCHECKED, PER_SAMPLE = "train.check_loss=false", "train.draws=per_sample"


def model_of(name):
    return (*runs.own_model(name), PACKAGES)


OWN = (*model_of("own_tasks.Net"), "data=digits")


def prepare(run_dir, *overrides):
    runs.prepare(run_dir, *OWN, *overrides).close()


def cross_entropies(model, batch):
    return F.cross_entropy(model(batch["inputs"]), batch["targets"], reduction="none")


def mean_of_one(model, batch):
    return cross_entropies(model, batch).mean(), 1, {}


def sum_of_one(model, batch):
    return cross_entropies(model, batch).sum(), 1, {}


def contrastive(model, batch):
    """Each sample's features against those of all mirrored ones."""
    first, second = (F.normalize(model.features(x), dim=1) for x in (batch["inputs"], batch["inputs"].flip(3)))
    return own_tasks.infonce(10 * first, second)


def weak_contrastive(model, batch):
    """Mostly a sum."""
    losses, (rest, _, _) = cross_entropies(model, batch), contrastive(model, batch)
    return losses.sum() + 0.03 * rest, len(losses), {}


def penalised(model, batch):
    """A penalty per micro-batch instead of per sample."""
    losses = cross_entropies(model, batch)
    return losses.sum() + 0.1 * sum(p.square().sum() for p in model.parameters()), len(losses), {}


def rounded_share(model, batch):
    """A share of the batch that is rounded, as of the hardest half: equal halves do not show it."""
    losses = cross_entropies(model, batch)
    return losses.sum() * 2 * max(1, len(losses) // 2) / len(losses), len(losses), {}


NO_SUM = r"the loss is not a sum over samples: .*"
REFUSED = {
    "own_tasks.mean": r"the loss is a mean, but a sum is required: for 4 samples .* 2\.\d+ with a count of 4, and",
    "test_loss_check.mean_of_one": r"the loss is a mean, but a sum is required: .* count of 1, and .* halves .* with 1",
    "test_loss_check.sum_of_one": r"the count does not add up: .* a count of 1, and .* halves .* with 1 and .* 1\. ",
    "test_loss_check.contrastive": NO_SUM + "`whole_batch = True`",
    "test_loss_check.weak_contrastive": NO_SUM + "`whole_batch = True`",
    "test_loss_check.penalised": NO_SUM,
    "test_loss_check.rounded_share": NO_SUM + "for the first and the others .* the sum of their weights",
}


@pytest.mark.parametrize("task", REFUSED)
def test_what_is_no_sum_is_refused(tmp_path, task):
    message = runs.refusal(tmp_path, *OWN, f"task={task}")
    assert re.match(rf"task={task}: {REFUSED[task]}", message)
    assert message.endswith("If it is intended, set train.check_loss=false")
    prepare(tmp_path, f"task={task}", UNCHECKED)


def weighted(model, batch):
    """The count is a sum of tiny weights, other ones for other samples."""
    weights = 1e-6 * (1 + batch["targets"])
    return (weights * cross_entropies(model, batch)).sum(), weights.sum(), {}


def cancelling(model, batch):
    """A critic: summands of both signs, whose sum is close to zero."""
    logits = model(batch["inputs"])
    logits = logits - logits.detach().mean(1, keepdim=True)
    return logits.sum(), len(logits), {}


def nothing(model, batch):
    return 0 * cross_entropies(model, batch).sum(), 0 * batch["targets"].sum(), {}


def not_a_number(model, batch):
    losses = cross_entropies(model, batch)
    return losses.sum() * (1.0 if model.training else float("nan")), len(losses), {}


def seeded_noise(model, batch):
    """The same noise in every call, which depends on the shape of the batch."""
    generator = torch.Generator().manual_seed(3)
    inputs = batch["inputs"] + torch.randn(batch["inputs"].shape, generator=generator)
    return cross_entropies(model, {**batch, "inputs": inputs}).sum(), len(inputs), {}


def noisy_by_numpy(model, batch):
    inputs = batch["inputs"] * (1 + np.random.rand() + random.random())
    return cross_entropies(model, {**batch, "inputs": inputs}).sum(), len(inputs), {}


def hungry(model, batch):
    """Runs out of memory as long as it has more than one sample, in evaluation mode."""
    if not model.training and len(batch["targets"]) > 1:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    return own_tasks.total(model, batch)


def of_two(model, batch):
    """No single sample runs, so equal halves alone are compared."""
    losses = cross_entropies(model, batch)
    if len(losses) < 2:
        raise ValueError("a single sample")
    return losses.sum(), len(losses), {}


SILENT = [of_two, weighted, cancelling, nothing, not_a_number, seeded_noise, noisy_by_numpy, hungry]


@pytest.mark.parametrize("task", SILENT, ids=lambda task: task.__name__)
def test_no_false_alarm(tmp_path, task):
    """Where the comparison fails or says nothing."""
    prepare(tmp_path, f"task=test_loss_check.{task.__name__}", "train.max_steps=1")


def test_lower_precision(tmp_path):
    prepare(tmp_path, "precision=bf16", "task=own_tasks.reads_a_blocks_weight")
    with pytest.raises(UserError, match="the loss is a mean"):
        prepare(tmp_path, "precision=bf16", "task=own_tasks.mean")


class Normalising(nn.Module):
    """Its samples interact in evaluation, too."""

    def __init__(self, num_classes: int):
        super().__init__()
        self.norm = nn.BatchNorm1d(64, track_running_stats=False)
        self.head = nn.Linear(64, num_classes)

    def forward(self, inputs):
        return self.head(self.norm(inputs.flatten(1)))


def test_a_model_whose_samples_interact(tmp_path):
    with pytest.raises(UserError, match=r"task=auto: the loss is not a sum over samples: .*running statistics"):
        runs.prepare(tmp_path, *model_of("test_loss_check.Normalising"), "data=digits", "train.seed=1")


class Sentences(torch.utils.data.Dataset):
    """Sequences of different lengths, padded to the longest of their batch."""

    def __init__(self, split: str, size: int = 20):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randint(1, 10, (3 + index % 5,), generator=generator)

    def collate(self, samples):
        return {"tokens": nn.utils.rnn.pad_sequence(samples, batch_first=True)}


class Embedder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(10, 8), nn.Linear(8, 10)

    def forward(self, tokens):
        return self.head(self.embedding(tokens))


def of_tokens(model, batch):
    losses = F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["tokens"].flatten(), reduction="none")
    kept = batch["tokens"].flatten() != 0
    return (losses * kept).sum(), kept.sum(), {}


def mean_of_tokens(model, batch):
    loss, count, _ = of_tokens(model, batch)
    return loss / count, count, {}


TEXTS = (*model_of("test_loss_check.Embedder"), "data._target_=test_loss_check.Sentences", "~data.augment")
TEXTS = (*TEXTS, "objective=min loss", "batch.global_size=1", "data.num_workers=0")


def test_padded_texts_whose_count_is_tokens(tmp_path):
    texts = (*TEXTS, "+data.size=3")
    runs.prepare(tmp_path, *texts, "task=test_loss_check.of_tokens").close()
    with pytest.raises(UserError, match="the loss is a mean, but a sum is required: for 2 samples"):
        runs.prepare(tmp_path, *texts, "task=test_loss_check.mean_of_tokens")


def test_a_single_sample_says_nothing(tmp_path):
    runs.prepare(tmp_path, *TEXTS, "+data.size=1", "task=test_loss_check.mean_of_tokens").close()


def of_stream(kind, *overrides):
    return (*OWN, f"data._target_={kind}", "~data.augment", "data.num_workers=0", "train.max_steps=3", *overrides)


class Kept(own_streams.Plain):
    """Its batches hold the samples themselves."""

    def collate(self, samples):
        return {name: [sample[name] for sample in samples] for name in ("inputs", "targets")}


def writing(model, batch):
    """Normalises what it was given in place."""
    inputs = torch.stack([image.mul_(0.5) for image in batch["inputs"]])
    targets = torch.tensor([int(target) for target in batch["targets"]])
    return F.cross_entropy(model(inputs), targets, reduction="sum"), len(inputs), {}


@pytest.mark.parametrize(("kind", "workers"), [("Plain", 0), ("Sharded", 2)])
def test_the_first_samples_of_a_stream_are_compared(tmp_path, kind, workers):
    before = set(multiprocessing.active_children())  # of other tests
    texts = of_stream(f"own_streams.{kind}", f"data.num_workers={workers}")
    with pytest.raises(UserError, match=r"^task=own_tasks\.mean: the loss is a mean, .* for 4 samples"):
        runs.run(tmp_path, *texts, "task=own_tasks.mean")
    with pytest.raises(UserError, match="the loss is not a sum over samples"):
        runs.run(tmp_path, *texts, "task=test_loss_check.contrastive")
    assert set(multiprocessing.active_children()) <= before  # those that read: torch would wait five seconds for each
    assert not (tmp_path / "metrics.jsonl").exists()
    assert runs.run(tmp_path, *texts, "task=own_tasks.mean", UNCHECKED).steps == 3


@pytest.mark.parametrize("kind", ["own_streams.Once", "test_loss_check.Kept"])
def test_they_stay_to_be_trained(tmp_path, monkeypatch, kind):
    """Also of a stream that can be read only once, and if the task writes to its batch."""
    read, ends = [], []
    sample = own_streams.Plain.sample
    monkeypatch.setattr(own_streams.Plain, "sample", lambda self, number: read.append(number) or sample(self, number))
    task = "test_loss_check.writing" if kind.endswith("Kept") else "own_tasks.total"
    for value in ("true", "false"):
        runs.run(tmp_path / value, *of_stream(kind, f"task={task}", f"train.check_loss={value}"))
        ends.append((runs.saved(tmp_path / value, 3), read.copy()))
        read.clear()
    assert runs.differences(*(end for end, _ in ends)) == []
    assert ends[0][1] == ends[1][1] == list(range(49))  # the last one is read ahead


def test_a_resumed_run_does_not_read_a_stream_from_its_beginning(tmp_path):
    texts = of_stream("own_streams.Once", "task=own_tasks.total")
    runs.run_until(tmp_path, 2, *texts).close()
    assert runs.run(tmp_path, *texts).steps == 3


def test_a_mean_over_many_is_told_however_small():
    losses = [(0.08, 2e5), (0.0799, 1e5), (0.0801, 1e5)]
    results = SplitResults(*(Sums(*sums, {}, False) for sums in losses))
    for is_joined in (True, False):
        assert Comparison(4, results, is_joined).defect() == Defect(DefectKind.MEAN)


def test_halves_are_known_by_their_values():
    """A `split` that returns everything makes none; a table is all of theirs."""
    whole = {"x": torch.arange(4.0)}
    halves = [{"x": torch.arange(2.0)}, {"x": torch.arange(2.0) + 2}]
    assert not batch_dims(whole, [whole, whole])
    assert batch_dims(whole, halves) == [0]
    assert join_parts(whole, halves[::-1], [0])["x"].tolist() == [2, 3, 0, 1]
    table = torch.eye(3)
    assert batch_dims((whole["x"], table), [(half["x"], table) for half in halves]) == [0, None]


ROWS = torch.arange(1.0, 13.0).view(4, 3) * (torch.arange(12).view(4, 3) % 3 != 1)
BATCHED = {
    "coo": lambda rows: rows.to_sparse(),
    "csr": lambda rows: rows.to_sparse_csr(),
    "nested": lambda rows: torch.nested.nested_tensor([row[: 1 + int(row[0]) % 3] for row in rows]),
    "jagged": lambda rows: torch.nested.nested_tensor(
        [row[: 1 + int(row[0]) % 3] for row in rows], layout=torch.jagged
    ),
}


@pytest.mark.parametrize("kind", BATCHED)
def test_so_are_those_of_sparse_and_nested_tensors(kind):
    make = BATCHED[kind]
    whole, a, b = make(ROWS), make(ROWS[:2]), make(ROWS[2:])
    assert batch_dims(whole, [a, b]) == [0]
    assert not batch_dims(whole, [b, a])
    assert not batch_dims(whole, [whole, whole])
    swapped = join_parts(whole, [b, a], [0])
    assert swapped.layout is whole.layout
    assert batch_dims(swapped, [b, a]) == [0]
    assert batch_dims((ROWS, whole), [(ROWS[:2], whole), (ROWS[2:], whole)]) == [0, None]  # one for all batches


def test_the_task_is_called_at_all(tmp_path, monkeypatch):
    """The tests of no trace would pass without a check."""
    calls = queue.SimpleQueue()  # a list would be put back after each trial

    def task(model, batch):
        calls.put((len(batch["targets"]), model.training, torch.is_grad_enabled()))
        return cross_entropies(model, batch).sum(), len(batch["targets"]), {}

    monkeypatch.setattr(own_tasks, "task_of_the_test", task, raising=False)
    prepare(tmp_path, "task=own_tasks.task_of_the_test", "train.draws=device")
    made = [calls.get() for _ in range(calls.qsize())]
    compared = [(size, training, False) for training in (False, True) for size in 2 * (4, 2, 2, 1, 3, 3, 1)]
    assert made == [*compared, *((size, True, True) for size in (4, 2, 2))]  # at the end with their gradients


def test_trainapps_own_parts_are_known(tmp_path, monkeypatch):
    monkeypatch.setattr("trainapp.trials.loss_check.compare_with_parts", lambda *_: pytest.fail("compared"))
    for model in runs.MODELS.values():
        runs.prepare(tmp_path, *model).close()


# --- small terms, large rounding

FOUR = first_samples(Digits("train"), range(4), 0)


def mode_of(task):
    return Mode(losses.CheckedTask(task, "mine"), EVALUATION, False)


def found(task, model, ways=("double", "fp32"), samples=FOUR):
    """What the check finds, trying these ways one after another."""
    inputs = ProbeInputs(losses.CheckedTask(task, "mine"), model, samples, torch.device("cpu"), 0)
    half = {"call_context": functools.partial(torch.autocast, "cpu", torch.bfloat16)}
    install_for(torch.device("cpu"), torch.bfloat16)  # as a run in bf16 does
    known = {
        "double": functools.partial(probe_in_fp64, inputs, noise=0.0),
        "fp32": functools.partial(TaskProbe, inputs),
        "bf16": functools.partial(TaskProbe, inputs, **half),
    }
    check = functools.partial(compare_with_parts, mode=mode_of(task), draw_record=DrawRecord())
    finding = first_working_result([ProbeFactory(way, known[way]) for way in ways], check).value.loss
    return finding.message if isinstance(finding, Refused) else None


def entropy_of_mean(logits, *_):
    mean = logits.softmax(1).mean(0)
    return (mean * mean.log()).sum()


def in_batch_negatives(logits, features, *_):
    return F.cross_entropy(features @ features.T, torch.arange(len(features)))


SMALL = {
    "load balance": (own_tasks.balance, 1e-2),
    "weak load balance": (own_tasks.balance, 1e-3),
    "importance": (own_tasks.importance, 1e-2),
    "entropy of the mean": (entropy_of_mean, 1e-2),
    "variance": (lambda logits, features, *_: F.relu(1 - features.std(0)).mean(), 1e-2),
    "covariance": (lambda logits, features, *_: torch.cov(features.T).square().mean(), 1e-2),
    "orthogonality": (lambda logits, x, *_: (x.T @ x / len(x) - torch.eye(x.shape[1])).square().mean(), 1e-2),
    "centring": (lambda logits, *_: (logits - logits.mean(0)).square().mean(), 1e-2),
    "negatives": (in_batch_negatives, 1e-3),
    "diversity": (lambda logits, features, *_: -torch.pdist(features).mean(), 1e-3),
    "largest": (lambda logits, *_: logits.abs().max(), 1e-3),
}


def with_term(model, batch, term="load balance", weight=None):
    """Cross-entropy plus a term of the whole batch, weighted as in the papers: a multiple of the mean loss."""
    logits, *others = model(batch["inputs"])
    function, usual = SMALL[term]
    count, losses = len(logits), F.cross_entropy(logits, batch["targets"], reduction="sum")
    return losses + (usual if weight is None else weight) * count * function(logits, *others), count, {}


@pytest.mark.parametrize("term", SMALL)
def test_a_small_term_of_the_whole_batch_is_refused(term):
    torch.manual_seed(0)
    model, task = own_tasks.Mixture(10), functools.partial(with_term, term=term)
    message = found(task, model)
    assert "the loss is not a sum over samples" in message
    assert "computes gradients itself" not in message
    assert found(functools.partial(task, weight=0), model) is None
    # A tolerance of 0.1% of the loss lets it pass.
    trial = TaskProbe(ProbeInputs(losses.CheckedTask(task, "mine"), model, FOUR, torch.device("cpu"), 0))
    whole, first, second = (trial(batch).loss for batch in (FOUR.whole, FOUR.first_half, FOUR.second_half))
    assert abs(whole - first - second) < 1e-3 * whole


def test_terms_that_rounding_does_not_hide_in_a_large_model_either():
    """Which is not copied in fp64, or cannot run in it."""
    torch.manual_seed(0)
    constant = torch.ones(64)

    def in_fp32_only(model, batch, term):
        return with_term(lambda x: model((x.flatten(1)[:, None] @ constant.diag())[:, 0]), batch, term)

    model = own_tasks.Mixture(10)
    for term in ("load balance", "importance", "entropy of the mean", "centring"):
        assert "not a sum" in found(functools.partial(with_term, term=term), model, ["fp32"])
        assert "not a sum" in found(functools.partial(in_fp32_only, term=term), model)


def plain(model, batch):
    return cross_entropies(model, batch).sum(), len(batch["targets"]), {}


def in_pieces(model, batch):
    """A long sum, one number after another in fp32."""
    pixels = (model(batch["inputs"])[:, None] - torch.linspace(0, 1, 20_000)[:, None]).square().float()
    return pixels.flatten().cumsum(0)[-1] / 20_000, len(pixels), {}


def in_half(dtype, model, batch):
    """The loss itself in 16 bits."""
    return cross_entropies(model, batch).to(dtype).sum(), len(batch["targets"]), {}


def fp32_inside(model, batch):
    logits = model(batch["inputs"])
    normal = F.layer_norm(logits.float(), logits.shape[1:]).to(logits.dtype)
    return F.cross_entropy(normal, batch["targets"], reduction="sum"), len(logits), {}


def bfloat16_inside(model, batch):
    return plain(lambda x: model.head(model.features(x)).bfloat16() @ torch.eye(10, dtype=torch.bfloat16), batch)


class Residual(nn.Sequential):
    def forward(self, inputs):
        return inputs + super().forward(inputs)


def deep():
    layers = [Residual(nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(12)]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(64, 10))


class Lstm(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 10)

    def forward(self, inputs):
        return self.head(self.body(inputs.reshape(-1, 8, 8))[0][:, -1])


HONEST = {
    "bf16": (plain, lambda: own_tasks.Net(10), ["bf16"]),
    "bf16 parameters": (plain, lambda: own_tasks.Net(10).bfloat16(), ["bf16"]),
    "loss in bf16": (functools.partial(in_half, torch.bfloat16), lambda: own_tasks.Net(10), ["double"]),
    "loss in fp16": (functools.partial(in_half, torch.float16), lambda: own_tasks.Net(10), ["double"]),
    "long sum": (in_pieces, lambda: own_tasks.Net(10), ["double"]),
    "fp32 inside": (fp32_inside, lambda: own_tasks.Net(10), ["double"]),
    "bf16 inside": (bfloat16_inside, lambda: own_tasks.Net(10).bfloat16(), ["bf16"]),
    "deep": (plain, deep, ["fp32"]),
    "deep in bf16": (plain, deep, ["bf16"]),
    "lstm in bf16": (plain, Lstm, ["bf16"]),
}


@pytest.mark.parametrize("name", HONEST)
def test_large_rounding_is_no_term(name):
    task, built, ways = HONEST[name]
    torch.manual_seed(0)
    model = built()
    assert found(task, model, ways) is None

    def mean(model, batch):
        loss, count, _ = task(model, batch)
        return loss / count, count, {}

    assert "the loss is a mean" in found(mean, model, ways)
    assert "not a sum" in found(lambda *own: (task(*own)[0] + 1, len(own[1]["targets"]), {}), model, ways)


def test_draws_are_seen_from_whatever_generator():
    values = torch.randn(2, 2, 8, 16)

    def seen(function):
        with Observer() as observed:
            function()
        return observed.draws

    assert seen(lambda: torch.randn(2, generator=torch.Generator()))
    assert seen(lambda: F.scaled_dot_product_attention(values, values, values, dropout_p=0.1))
    assert not seen(lambda: F.scaled_dot_product_attention(values, values, values))
    assert not seen(lambda: F.dropout(values, 0.1, training=False))


def mixed(model, batch):
    """Mixup in the forward."""
    inputs = batch["inputs"]
    if model.training:
        inputs = 0.9 * inputs + 0.1 * inputs[torch.randperm(len(inputs))]
    return plain(model, {**batch, "inputs": inputs})


def within_capacity(model, batch):
    """Leaves out the samples that are too many for an expert."""
    losses = cross_entropies(model, batch)
    kept = (3 * len(losses) + 3) // 4 if model.training else None
    return losses[:kept].sum(), len(losses), {}


def normalised(model, batch):
    inputs = batch["inputs"]
    if model.training:
        inputs = inputs / inputs.std()
    return plain(model, {**batch, "inputs": inputs})


class Initialised(own_tasks.Net):
    """Its first forward sets its scale (Kingma and Dhariwal 2018)."""

    def __init__(self, num_classes: int):
        super().__init__(num_classes)
        self.scale, self.is_new = nn.Parameter(torch.ones(())), True

    def forward(self, inputs):
        if self.training and self.is_new:
            self.scale.data.fill_(1 / inputs.std())
            self.is_new = False
        return super().forward(self.scale * F.dropout(inputs, 0.1, self.training))


@pytest.mark.parametrize("task", [mixed, within_capacity, normalised], ids=lambda task: task.__name__)
def test_what_is_no_sum_only_in_training(tmp_path, task):
    message = runs.refusal(tmp_path, *OWN, PER_SAMPLE, f"task=test_loss_check.{task.__name__}")
    assert "the loss is not a sum over samples in training mode" in message


def noisy(model, batch):
    return plain(lambda inputs: model(F.dropout(inputs + torch.randn_like(inputs), 0.1)), batch)


def noisy_and_compared(model, batch):
    loss, count, _ = noisy(model, batch)
    return loss + 1e-3 * count * in_batch_negatives(None, model.features(batch["inputs"])), count, {}


def test_each_sample_draws_the_same(tmp_path):
    """So that a task that draws is compared, too, unless train.draws=device leaves the draws to torch."""
    prepare(tmp_path, PER_SAMPLE, "task=test_loss_check.noisy")
    compared = "task=test_loss_check.noisy_and_compared"
    assert "not a sum" in runs.refusal(tmp_path, *OWN, PER_SAMPLE, compared)
    prepare(tmp_path, "train.draws=device", compared)


def test_a_forward_that_writes_state_is_not_compared_in_training(tmp_path):
    model = (*model_of("test_loss_check.Initialised"), PER_SAMPLE, "data=digits")
    runs.prepare(tmp_path, *model, "task=test_loss_check.plain").close()


def metric_of(function):
    def task(model, batch):
        logits = model(batch["inputs"])
        value = function(logits, batch["targets"])
        return F.cross_entropy(logits, batch["targets"], reduction="sum"), len(logits), {"mine": value}

    return task


def right(logits, targets):
    return (logits.argmax(1) == targets).float()


def ranked(logits, targets):
    """An area under a curve."""
    scores = logits[:, 0]
    return ((scores[:, None] > scores) == (targets[:, None] > targets)).double().mean()


MEAN, NO_METRIC_SUM = "the metric mine is a mean, but a sum", "the metric mine is not a sum over samples"
METRICS = {
    "sum": (lambda logits, targets: right(logits, targets).sum(), None),
    "called later": (lambda logits, targets: lambda: targets.sum(), None),
    "weighted": (lambda logits, targets: (1e-9 * targets * logits[:, 0]).sum(), None),
    "equal logits": (lambda logits, targets: right(0 * logits, targets).sum(), None),
    "not a number": (lambda logits, targets: logits.sum() * float("nan"), None),
    "mean": (lambda logits, targets: targets.double().mean(), MEAN),
    "called later, mean": (lambda logits, targets: lambda: logits.square().mean(), MEAN),
    "of the model": (lambda logits, targets: 0.07, MEAN),
    "largest": (lambda logits, targets: logits.max(), "the metric mine is"),
    "of pairs": (lambda logits, targets: torch.pdist(logits).sum(), NO_METRIC_SUM),
    "ranked": (ranked, "the metric mine is"),
}


@pytest.mark.parametrize("name", METRICS)
def test_metrics_are_compared_too(name):
    torch.manual_seed(0)
    function, message = METRICS[name]
    problem = found(metric_of(function), own_tasks.Net(10))
    assert problem is None if message is None else message in problem


def errors(logits, targets):
    """Squared, per sample."""
    return (logits.float() - F.one_hot(targets, 10)).square().mean(1)


def psnr(errors):
    return -10 * errors.log10()


def f1(logits, targets):
    """Of even digits, by their probability."""
    predicted, true = logits.softmax(1)[:, ::2].sum(1), targets % 2 == 0
    return 2 * (predicted * true).sum() / (predicted.sum() + true.sum())


# What is published, and the same of a batch times the number of its samples.
PER_SAMPLE_METRICS = {
    "accuracy": lambda logits, targets: (logits.argmax(1) == targets).sum(),
    "accuracy, mean times n": lambda logits, targets: right(logits, targets).mean() * len(targets),
    "top-5": lambda logits, targets: (logits.topk(5, 1).indices == targets[:, None]).any(1).float().sum(),
    "MAE": lambda logits, targets: (logits - F.one_hot(targets, 10)).abs().mean(1).sum(),
    "MSE": lambda logits, targets: errors(logits, targets).mean() * len(targets),
    "RMSE": lambda logits, targets: errors(logits, targets).sqrt().sum(),
    "PSNR": lambda logits, targets: psnr(errors(logits, targets)).sum(),
    "negative log-likelihood": lambda logits, targets: F.cross_entropy(logits, targets, reduction="sum"),
    "bias": lambda logits, targets: (logits[:, 0].float() - targets / 10).sum(),
    "bias of large numbers": lambda logits, targets: ((1e3 + logits[:, 0].float()) - (1e3 + targets / 10)).sum(),
    "bias by NumPy": lambda logits, targets: float((logits[:, 0].float().numpy().astype("f") - 0.1).sum()),
    "in words of a mask": lambda logits, targets: ((logits.sigmoid().round() == 1).float().mean(1)).sum(),
}
OF_THE_BATCH = {
    "PSNR": lambda logits, targets: psnr(errors(logits, targets).mean()) * len(targets),
    "RMSE": lambda logits, targets: errors(logits, targets).mean().sqrt() * len(targets),
    "F1": lambda logits, targets: f1(logits, targets) * len(targets),
    "perplexity": lambda logits, targets: F.cross_entropy(logits, targets).exp() * len(targets),
    "R2": lambda logits, targets: (1 - errors(logits, targets).sum() / targets.double().var()) * len(targets),
}


class Normalised(own_tasks.Net):
    """With BatchNorm and a head of equal weights: all classes are as likely, up to rounding."""

    def __init__(self, num_classes: int, equal: bool):
        super().__init__(num_classes)
        self.norm = nn.BatchNorm1d(16)
        if equal:
            nn.init.constant_(self.head.weight, 0.01)
            nn.init.constant_(self.head.bias, 0.0)

    def features(self, inputs):
        return self.norm(super().features(inputs))


PRECISIONS = pytest.mark.parametrize("way", ["double", "fp32", "bf16"])


@PRECISIONS
@pytest.mark.parametrize("name", PER_SAMPLE_METRICS)
@pytest.mark.parametrize("equal", [False, True], ids=["random head", "equal weights"])
def test_honest_metrics_pass(name, way, equal):
    for seed in range(4):
        torch.manual_seed(seed)
        samples = first_samples(Digits("train"), range(4 * seed, 4 * seed + 4), 0)
        assert found(metric_of(PER_SAMPLE_METRICS[name]), Normalised(10, equal), [way], samples) is None


@pytest.mark.parametrize("way", ["double", "fp32"])
@pytest.mark.parametrize("name", OF_THE_BATCH)
def test_a_metric_of_the_batch_times_its_samples_is_refused(name, way):
    """Its sum over micro-batches is another one for each size: some by less than 1%."""
    for later in (False, True):
        torch.manual_seed(0)
        function = OF_THE_BATCH[name]

        def called_later(logits, targets, function=function):
            return lambda: function(logits, targets)

        problem = found(metric_of(called_later if later else function), Normalised(10, equal=False), [way])
        assert "the metric mine is" in problem
        assert "but a sum is required" in problem


def test_the_objective_may_not_depend_on_memory(tmp_path):
    def of(name):
        return (*OWN, f"task=test_loss_check.{name}", "objective=max psnr")

    message = runs.refusal(tmp_path, *of("with_psnr_of_the_batch"))
    assert message.startswith("task=test_loss_check.with_psnr_of_the_batch: the metric psnr is not a sum over samples")
    assert "return the sum of the samples' own values" in message
    runs.prepare(tmp_path, *of("with_psnr")).close()


def with_psnr(model, batch):
    logits = model(batch["inputs"])
    value = psnr(errors(logits, batch["targets"])).sum()
    return F.cross_entropy(logits, batch["targets"], reduction="sum"), len(logits), {"psnr": value}


def with_psnr_of_the_batch(model, batch):
    loss, count, _ = with_psnr(model, batch)
    value = psnr(errors(model(batch["inputs"]), batch["targets"]).mean()) * count
    return loss, count, {"psnr": value}


def test_rounding_changes_what_is_computed_and_nothing_else():
    torch.manual_seed(0)
    values = torch.randn(2, 3, dtype=torch.float64)
    before, mask = values.clone(), values > 0

    def rounded(function, seed=0):
        with RandomRounding(torch.device("cpu"), seed):
            return function()

    changed = rounded(lambda: values * 2)
    assert 0 < (changed - 2 * values).abs().max() <= 2e-7 * values.abs().max() * 2
    assert not torch.equal(changed, rounded(lambda: values * 2, seed=1))
    assert torch.equal(rounded(lambda: values.view(3, 2).t()), values.view(3, 2).t())  # a view
    assert torch.equal(values, before)
    assert torch.equal(rounded(lambda: mask.float().sum()), mask.float().sum())  # an integer
    assert torch.equal(rounded(lambda: torch.full((3,), 0.3)), torch.full((3,), 0.3))  # not computed
    cancelling = rounded(lambda: ((values + 1e3) - 1e3 - values).sum())
    assert 1e-6 < abs(cancelling) < 1e-2


class Priors(own_tasks.Net):
    """Its logarithms are not finite with noise."""

    def __init__(self, num_classes: int):
        super().__init__(num_classes)
        self.priors = nn.Parameter(torch.full((64,), 1 / 64))

    def forward(self, inputs):
        return super().forward(inputs) + self.priors.log().mean()


def test_parameters_that_noise_makes_invalid_hide_nothing(tmp_path):
    own = (*model_of("test_loss_check.Priors"), PER_SAMPLE, "data=digits", "task=own_tasks.mean")
    assert "the loss is a mean" in runs.refusal(tmp_path, *own)


def test_a_gate_that_is_uniform_at_the_start_hides_nothing(tmp_path):
    gated = (*model_of("own_tasks.Uniform"), "data=digits", "task=own_tasks.balanced")
    assert "the loss is not a sum" in runs.refusal(tmp_path, *gated)


SCALAR = torch.ones((), requires_grad=True)
WRONG = {
    "a dict": ({"loss": 1}, "{'loss': int}"),
    "losses": ((torch.ones(4, requires_grad=True), 4, {}), "(torch.float32[4], int, {})"),
    "a number": ((1.0, 4, {}), "(float, int, {})"),
    "complex": ((SCALAR.to(torch.complex64), 4, {}), "(torch.complex64[], int, {})"),
    "no count": ((SCALAR, None, {}), "(torch.float32[], NoneType, {})"),
    "counts": ((SCALAR, torch.ones(4), {}), "(torch.float32[], torch.float32[4], {})"),
    "a list": ((SCALAR, 4, []), "(torch.float32[], int, [])"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_form_has_one_message(name):
    result, form = WRONG[name]
    message = rf"^task=mine: must return \(loss_sum, count, metrics\): .* It returned {re.escape(form)}$"
    with pytest.raises(UserError, match=message):
        losses.CheckedTask(lambda model, batch: result, "task=mine")(None, None)


@pytest.mark.parametrize("name", ["losses", "no count", "counts", "a list"])
def test_a_wrong_form_after_the_first_result_too(name):
    results = iter([(SCALAR, 4, {}), WRONG[name][0]])
    task = losses.CheckedTask(lambda model, batch: next(results), "task=mine")
    task(None, None)
    with pytest.raises(UserError, match=r"^task=mine: must return"):
        task(None, None)
