"""What depends on the padding is named before the first step: a smaller micro-batch is padded differently."""

import functools
import json
import queue

import helpers
import pytest
import runs
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

from trainapp.data.joining import is_padded
from trainapp.draws.record import DrawRecord
from trainapp.losses.losses import CheckedTask
from trainapp.optim.emulated_kernels import install_for
from trainapp.training.evaluation.loop import EVALUATION
from trainapp.trials.messages import DependsOnSplit, Refused
from trainapp.trials.modes import Mode
from trainapp.trials.parts import compare_with_parts
from trainapp.trials.precisions import probe_in_fp64
from trainapp.trials.probe import ProbeInputs, TaskProbe
from trainapp.trials.samples import SEARCHED_SAMPLES, first_samples, with_batch_as_trained

HERE = "user_packages=[test_padded_batches]"
TASK = "task=test_padded_batches."


class Sequences(torch.utils.data.Dataset):
    """Tokens and their classes, of 3 to 11 of them, padded to the longest of their batch."""

    def __init__(self, split: str, size: int = 40, equal: int = 0):
        self.size, self.equal = size, equal  # equal: so many samples at the start have one length

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        length = 5 if index < self.equal else 3 + (7 * index) % 9
        return torch.randint(1, 10, (2, length), generator=generator)

    def collate(self, samples):
        tokens, targets = zip(*samples, strict=True)
        return {
            "tokens": pad_sequence(tokens, batch_first=True),
            "targets": pad_sequence(targets, batch_first=True, padding_value=-100),
            "lengths": torch.tensor([len(own) for own in tokens]),
        }


class InAStream(torch.utils.data.IterableDataset):
    def __init__(self, split: str):
        self.sequences = Sequences(split)
        self.collate = self.sequences.collate

    def __iter__(self):
        return map(self.sequences.__getitem__, range(len(self.sequences)))


class Encoder(nn.Module):
    def __init__(self, dropout: float = 0.1, zero: bool = False):
        super().__init__()
        self.embedding, self.positions = nn.Embedding(10, 16), nn.Embedding(12, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=dropout, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 10)
        for block in self.body.layers if zero else ():  # hides what attention reads
            nn.init.zeros_(block.self_attn.out_proj.weight)

    def forward(self, tokens, mask=None):
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.embedding(tokens) + self.positions(positions)
        return self.head(self.body(hidden, src_key_padding_mask=mask))


def logits_and_targets(model, batch, masked=True):
    mask = batch["tokens"] == 0 if masked else None
    return model(batch["tokens"], mask).flatten(0, 1), batch["targets"].flatten()


def honest(model, batch):
    logits, targets = logits_and_targets(model, batch)
    right = (logits.argmax(1) == targets).sum()
    return F.cross_entropy(logits, targets, reduction="sum"), (targets != -100).sum(), {"accuracy": right}


def counting_padding(model, batch):
    loss, _, metrics = honest(model, batch)
    return loss, batch["targets"].numel(), metrics


def mean_of_tokens_times_samples(model, batch):
    return F.cross_entropy(*logits_and_targets(model, batch)) * len(batch["tokens"]), len(batch["tokens"]), {}


def without_a_mask(model, batch):
    logits, targets = logits_and_targets(model, batch, masked=False)
    return F.cross_entropy(logits, targets, reduction="sum"), (targets != -100).sum(), {}


IN_DOUBLE = "adds up over 4 samples, as do count and metrics, in fp64, with noise too"
KINDS = ("Sequences", "InAStream")


def settings(kind="Sequences", model="Encoder", task="honest"):
    data = (f"data._target_=test_padded_batches.{kind}", "~data.augment", "data.num_workers=0", "train.max_steps=2")
    return (*runs.own_model(f"test_padded_batches.{model}"), HERE, *data, f"{TASK}{task}", "objective=min loss")


def trained(run_dir, caplog, *overrides):
    """A run's record: warnings, what depends on the micro-batch, and what was checked."""
    caplog.clear()
    result = runs.run(run_dir, *runs.STEPS_ONLY, *overrides, "batch.micro_size=4")
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    warnings = [text for text in warnings if not text.startswith("objective=")]  # the run is never evaluated
    assert helpers.result(run_dir)["depends_on_micro_batch"] == result.depends_on_micro_batch
    return warnings, result.depends_on_micro_batch, json.loads((run_dir / "recipe.json").read_text())["checks"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("task", ["mean_of_tokens_times_samples", "without_a_mask"])
def test_a_loss_that_depends_on_the_padding_is_named(tmp_path, caplog, kind, task):
    warnings, depends, checks = trained(tmp_path, caplog, *settings(kind, task=task))
    assert warnings == depends
    (text,) = depends
    assert text.startswith(f"task=test_padded_batches.{task}: the loss depends on the padding: for 4 samples")
    assert ". So the result depends on the micro-batch, and that of an evaluation on batch.eval_micro_size. " in text
    assert checks["padding"].startswith("does not add up: the loss is ")


@pytest.mark.parametrize("kind", KINDS)
def test_a_count_that_includes_the_padding_is_refused(tmp_path, kind):
    message = runs.refusal(tmp_path, *settings(kind, task="counting_padding"))
    assert message.startswith("task=test_padded_batches.counting_padding: the count includes padding: for 4 samples")


@pytest.mark.parametrize("kind", KINDS)
def test_an_honest_task_passes(tmp_path, caplog, kind):
    warnings, depends, checks = trained(tmp_path, caplog, *settings(kind))
    assert (warnings, depends) == ([], [])
    assert checks["padding"] == checks["padding in training"] == checks["loss"] == IN_DOUBLE


# --- other batches, in every precision


def samples_of(data, split=None):
    indices = list(range(min(len(data), SEARCHED_SAMPLES)))
    return with_batch_as_trained(first_samples(data, indices[:4], 0), data, indices, 0, split)


def finding_for(task, model, samples, way="fp64"):
    """What the check finds about the padding."""
    inputs = ProbeInputs(CheckedTask(task, "task=mine"), model, samples, torch.device("cpu"), 0)
    install_for(torch.device("cpu"), torch.bfloat16)  # as a run in bf16 does
    if way == "fp64":
        trial = probe_in_fp64(inputs, noise=0.0)
    elif way == "fp32":
        trial = TaskProbe(inputs)
    else:
        trial = TaskProbe(inputs, call_context=functools.partial(torch.autocast, "cpu", torch.bfloat16))
    findings = compare_with_parts(trial, Mode(inputs.task, EVALUATION, False), DrawRecord())
    return findings.loss if findings.padding is None else findings.padding


class Sounds(Sequences):
    """Features [T, 4] and a shorter text for each, with time first and the lengths of both."""

    def __getitem__(self, index):
        tokens, targets = super().__getitem__(index)
        return F.one_hot(tokens, 10)[:, :4].float(), targets[: 1 + len(targets) // 3]

    def collate(self, samples):
        sounds, texts = zip(*samples, strict=True)
        return {
            "sounds": pad_sequence(sounds),
            "lengths": torch.tensor([len(sound) for sound in sounds]),
            "texts": pad_sequence(texts, batch_first=True),
            "text_lengths": torch.tensor([len(text) for text in texts]),
        }


class Listener(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.LSTM(4, 8, bidirectional=True), nn.Linear(16, 10)

    def forward(self, sounds, lengths):
        packed = pack_padded_sequence(sounds, lengths, enforce_sorted=False)
        return self.head(pad_packed_sequence(self.body(packed)[0])[0])


def ctc(model, batch):
    scores = model(batch["sounds"], batch["lengths"]).log_softmax(2)
    lengths = (batch["lengths"], batch["text_lengths"])
    loss = F.ctc_loss(scores, batch["texts"], *lengths, reduction="sum", zero_infinity=True)
    return loss, len(batch["lengths"]), {}


def masked_language_model(model, batch):
    """Which tokens are masked depends on them alone."""
    tokens, is_masked = batch["tokens"], batch["tokens"] % 3 == 1
    logits = model(tokens.masked_fill(is_masked, 9), tokens == 0)
    losses = F.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="none")
    return (losses * is_masked.flatten()).sum(), is_masked.sum(), {}


class Graphs(Sequences):
    """The nodes of all graphs in one table, and for each the number of its graph, from which edges are counted."""

    def collate(self, samples):
        sizes = torch.tensor([sample.shape[1] for sample in samples])
        ends = sizes.cumsum(0)
        first = torch.cat([torch.arange(size - 1) + end - size for size, end in zip(sizes, ends, strict=True)])
        return {
            "tokens": torch.cat([tokens for tokens, _ in samples]),
            "targets": torch.cat([targets for _, targets in samples]),
            "edges": torch.stack([first, first + 1]),
        }


class GraphNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.message, self.head = nn.Embedding(10, 8), nn.Linear(8, 8), nn.Linear(8, 10)

    def forward(self, tokens, edges):
        nodes = self.embedding(tokens)
        return self.head(nodes.index_add(0, edges[1], self.message(nodes[edges[0]]).to(nodes.dtype)))


def of_graphs(model, batch):
    logits = model(batch["tokens"], batch["edges"])
    return F.cross_entropy(logits, batch["targets"], reduction="sum"), len(logits), {}


class Sorted(Sequences):
    """The longest sequence first, as packing asks for."""

    def collate(self, samples):
        return super().collate(sorted(samples, key=lambda sample: -sample.shape[1]))


class AtTheEnd(Sequences):
    """Padded on the left."""

    def collate(self, samples):
        batch = super().collate([sample.flip(1) for sample in samples])
        return {name: tensor.flip(1) if tensor.dim() > 1 else tensor for name, tensor in batch.items()}


HONEST = {
    "transformer": (honest, Encoder, Sequences),
    "some of one length": (honest, Encoder, functools.partial(Sequences, equal=6)),
    "ctc": (ctc, Listener, Sounds),
    "masked language model": (masked_language_model, Encoder, Sequences),
    "graphs": (of_graphs, GraphNetwork, Graphs),
    "sorted": (honest, Encoder, Sorted),
}


@pytest.mark.parametrize("way", ["fp64", "fp32", "bf16"])
@pytest.mark.parametrize("name", HONEST)
def test_honest_tasks_pass(name, way):
    task, model, data = HONEST[name]
    for seed in range(3):
        torch.manual_seed(seed)
        samples = samples_of(data("train"))
        assert samples.as_trained.batches
        finding = finding_for(task, model(), samples, way)
        assert str(finding).startswith("adds up over 4 samples")


@pytest.mark.parametrize("way", ["fp64", "fp32", "bf16"])
@pytest.mark.parametrize("data", [Sequences, functools.partial(Sequences, equal=6), AtTheEnd, Sorted])
def test_other_tasks_do_not(data, way):
    torch.manual_seed(0)
    samples, model = samples_of(data("train")), Encoder()
    finding = finding_for(counting_padding, model, samples, way)
    assert isinstance(finding, Refused) == samples.as_trained.is_padded == (data is not Sorted)
    assert "the count " in finding.message
    for task in (mean_of_tokens_times_samples, without_a_mask) if way != "bf16" else ():  # 2% may be its rounding
        assert "the loss depends on " in finding_for(task, model, samples, way).message


# --- what depends on it by design, and what could not be compared


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.body, self.head = nn.Embedding(10, 8), nn.Conv1d(8, 8, 3, padding=1), nn.Linear(8, 10)

    def forward(self, tokens, mask=None):
        return self.head(self.body(self.embedding(tokens).transpose(1, 2)).transpose(1, 2).relu())


class BeginsAtZero(Encoder):
    def __init__(self):
        super().__init__(zero=True)


def counting_padding_in_a_metric(model, batch):
    loss, count, _ = honest(model, batch)
    return loss, count, {"empty": (batch["tokens"] == 0).sum()}


def counting_weights_of_padding(model, batch):
    loss, _, _ = honest(model, batch)
    return loss, 0.3 * batch["targets"].numel(), {}


def test_padding_that_a_convolution_sees_by_design_is_named(tmp_path, caplog):
    warnings, (text,), _ = trained(tmp_path, caplog, *settings(model="Convolutions"))
    assert warnings == [text]
    assert "If the model sees padding by design, such as convolutions over it" in text


def test_a_layer_that_begins_at_zero_hides_nothing(tmp_path, caplog):
    _, (text,), checks = trained(tmp_path, caplog, *settings(model="BeginsAtZero", task="without_a_mask"))
    assert text.endswith("Seen with noise on the parameters")
    assert "in fp64; with noise: does not add up: the loss is " in checks["padding"]


def test_metrics_and_weights_are_compared_too(tmp_path, caplog):
    _, (text,), _ = trained(tmp_path / "metric", caplog, *settings(task="counting_padding_in_a_metric"))
    assert "the metric empty depends on the padding: for 4 samples padded together it is " in text
    _, (text,), _ = trained(tmp_path / "weights", caplog, *settings(task="counting_weights_of_padding"))
    assert "the count depends on the padding: for 4 samples padded together it is " in text


def test_it_costs_two_forwards_more(tmp_path, monkeypatch):
    sizes = queue.SimpleQueue()  # a list would be put back after each trial
    task = honest

    def counted(model, batch):
        sizes.put(len(batch["tokens"]))
        return task(model, batch)

    monkeypatch.setitem(globals(), "honest", counted)
    runs.closed(tmp_path, *settings(), "train.draws=device")
    # In two modes, without noise and with. The fourth forward of a mode shows what its metrics sum: tokens. The last
    # three are those of the gradients, in training.
    compared = 2 * [4, 2, 2, 4, 4, 2, 4, 2, 2, 4, 2]
    assert [sizes.get() for _ in range(sizes.qsize())] == [*compared, 4, 2, 2]


def test_the_check_can_be_switched_off(tmp_path, caplog):
    found = trained(tmp_path, caplog, *settings(task="counting_padding"), "train.check_loss=false")
    assert found[:2] == ([], [])


def test_a_resumed_run_says_it_again(tmp_path, caplog):
    """Of a stream, too, whose samples are compared only from the start."""
    of_stream = settings("InAStream", task="without_a_mask")
    runs.run(tmp_path, *runs.TINY, *of_stream, "batch.micro_size=4")
    caplog.clear()
    resumed = runs.run(tmp_path, *runs.TINY, *of_stream, "batch.micro_size=4", "train.max_steps=4")
    (text,) = resumed.depends_on_micro_batch
    assert (resumed.steps, sum(record.getMessage() == text for record in caplog.records)) == (4, 1)


class Masking(Sequences):
    """Hides tokens at random, as collate functions of masked language models do."""

    def collate(self, samples):
        batch = super().collate(samples)
        hidden = torch.rand(batch["tokens"].shape) < 0.3
        return {**batch, "targets": torch.where(hidden, batch["targets"], -100)}


class MaskingByItsOwn(Sequences):
    def __init__(self, split: str, size: int = 40):
        super().__init__(split, size)
        self.generator = torch.Generator().manual_seed(0)

    def collate(self, samples):
        batch = super().collate(samples)
        hidden = torch.rand(batch["tokens"].shape, generator=self.generator) < 0.3
        return {**batch, "targets": torch.where(hidden, batch["targets"], -100)}


class OneLength(Sequences):
    def __init__(self, split: str):
        super().__init__(split, equal=40)


class Lost(OneLength):
    def __getitem__(self, index):
        if index > 5:
            raise OSError("no such sample")
        return super().__getitem__(index)


def test_the_reason_is_told_where_nothing_could_be_compared():
    told = {
        kind: str(samples_of(kind("train")).as_trained.obstacle) for kind in (Masking, MaskingByItsOwn, OneLength, Lost)
    }
    assert told == {
        Masking: "the data's `collate` draws random numbers",
        MaskingByItsOwn: "the data's `collate` draws random numbers",
        OneLength: "the first 16 samples have one shape",
        Lost: "OSError: no such sample",
    }


def test_an_error_for_long_samples_hides_nothing_of_the_others():
    model, samples = Encoder(), samples_of(Sequences("train", equal=6))
    model.positions = nn.Embedding(5, 16)
    assert str(finding_for(honest, model, samples)) == "IndexError: index out of range in self"


@pytest.mark.parametrize("kind", ["Masking", "MaskingByItsOwn"])
def test_random_masks_are_no_padding(tmp_path, caplog, kind):
    warnings, (text,), checks = trained(tmp_path, caplog, *settings(kind))
    assert text.startswith("the data's `collate` draws random numbers for each micro-batch, not for the step")
    assert warnings == [f"step 1: {text}"]
    reasons = [checks.get("padding", ""), checks["loss"]]
    assert any(str(samples_of(globals()[kind]("train")).as_trained.obstacle) in reason for reason in reasons)


def assert_padded(samples, first_half_is_split):
    """Assert that another second half is compared, with padding, and whether `split` has made the halves."""
    whole, first_half, second_half = samples.as_trained.batches
    assert whole is not samples.whole
    assert second_half is not samples.second_half
    assert (first_half is not samples.first_half) == first_half_is_split
    assert [batch.positions for batch in samples.as_trained.batches] == [
        samples.whole.positions,
        samples.first_half.positions,
        samples.second_half.positions,
    ]
    assert samples.as_trained.is_padded
    assert samples.as_trained.obstacle is None


@pytest.mark.parametrize("size", [2, 3])
def test_few_samples(size):
    samples = samples_of(Sequences("train", size))
    assert samples.number == 2
    assert_padded(samples, first_half_is_split=False)
    assert isinstance(finding_for(counting_padding, Encoder(), samples), Refused)


def without_padding(batch, start, end):
    longest = batch["lengths"][start:end].max()
    return {
        name: tensor[start:end, :longest] if tensor.dim() > 1 else tensor[start:end] for name, tensor in batch.items()
    }


def by_rows(batch, start, end):
    return {name: tensor[start:end] for name, tensor in batch.items()}


def test_a_batch_is_cut_as_the_data_says():
    """Where this changes nothing, the samples of a micro-batch are still collated by themselves."""
    samples = samples_of(Sequences("train"), without_padding)
    assert_padded(samples, first_half_is_split=True)
    assert isinstance(finding_for(counting_padding, Encoder(), samples), Refused)
    assert not isinstance(finding_for(honest, Encoder(), samples), (Refused, DependsOnSplit))
    assert_padded(samples_of(Sequences("train"), by_rows), first_half_is_split=False)


def test_what_is_padding():
    parts = [torch.arange(1, 7).view(2, 3), torch.arange(7, 9).view(2, 1)]
    right = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 0, 0], [8, 0, 0]])
    left = torch.tensor([[1, 2, 3], [4, 5, 6], [0, 0, 7], [0, 0, 8]])
    lengths, halves = torch.tensor([3, 3, 1, 1]), [torch.tensor([3, 3]), torch.tensor([1, 1])]
    for whole in (right, left):
        assert is_padded((whole, lengths), list(zip(parts, halves, strict=True)))
        assert is_padded(whole.t(), [part.t() for part in parts])
    assert not is_padded(right[:, :2], parts)  # cut to the shortest
    assert not is_padded(right.flip(0), parts)
    assert not is_padded(right + 1, parts)
