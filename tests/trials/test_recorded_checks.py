"""What was checked before the first step, and what could not be and why: see `Assembly.checks`."""

import json
import random

import own_graphs
import own_tasks
import pytest
import runs
import torch
from torch import nn
from torch.nn import functional as F

from trainapp.assembly.engine import assemble
from trainapp.assembly.resources import open_resources
from trainapp.parallel.ranks import SingleRank
from trainapp.tasks import EmbeddingTask
from trainapp.trials import modes

TASK = "task=test_recorded_checks."
HERE = "user_packages=[own_tasks,own_graphs,own_streams,test_recorded_checks]"
NET = (*runs.own_model("own_tasks.Net"), HERE, "data=digits")
IN_DOUBLE = "adds up over 4 samples, as does its count, in fp64, with noise too"
METRICS = IN_DOUBLE.replace("does its count", "do count and metrics")
UNKNOWN = "not known: {}; the first dimension as long as the batch counts as theirs"


def checks_of(run_dir, *overrides, resumes=False):
    """The record of a run that is assembled for training."""
    config = runs.configure(run_dir, *overrides)
    parts = open_resources(config, SingleRank(), checkpoint=run_dir if resumes else None)
    try:
        outcomes = assemble(config, parts, SingleRank()).checks
    finally:
        parts.close()
    assert all(text and "\n" not in text for text in outcomes.values())
    return outcomes


def total(model, batch):
    loss = F.cross_entropy(model(batch["inputs"]), batch["targets"], reduction="sum")
    return loss, len(batch["targets"]), {"right": 1.0 * len(batch["targets"])}


def test_what_adds_up(tmp_path):
    told = checks_of(tmp_path, *NET, "task=test_recorded_checks.total")
    assert told == {"draws": "none", "draws in training": "none", "loss": METRICS, "loss in training": METRICS}


def test_parts_of_trainapp_are_known(tmp_path):
    told = checks_of(tmp_path, *runs.MODELS["gpt"])
    assert told == dict.fromkeys(("draws", "draws in training", "loss", "loss in training"), modes.NO_CHECK_NEEDED)


# --- sparse tensors


@pytest.mark.parametrize("layout", ["coo", "csr", "dense"])
@pytest.mark.parametrize("place", own_graphs.PLACES)
def test_a_graph_network_is_compared_in_fp64(tmp_path, layout, place):
    graph = (*runs.own_model("own_graphs.GraphNet"), f"+model.layout={layout}", f"+model.place={place}", HERE)
    told = checks_of(tmp_path, *graph, "data=digits", "task=own_graphs.total")
    assert told == {
        "draws": "none",
        "draws in training": "all belong to samples",
        "loss": IN_DOUBLE,
        "loss in training": IN_DOUBLE,
    }
    message = runs.refusal(tmp_path, *graph, "data=digits", "task=own_graphs.mean")
    assert message.startswith("task=own_graphs.mean: the loss is a mean, but a sum is required: for 4 samples")


class SparseBatches(torch.utils.data.Dataset):
    """Images as sparse rows of a matrix, [B, 64], or as one graph per batch, whose matrix is block-diagonal."""

    layout, is_one_graph = torch.sparse_coo, False

    def __init__(self, split: str, size: int = 20):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        values = torch.rand(64, generator=torch.Generator().manual_seed(index))
        return values * (values > 0.5), index % 10

    def collate(self, samples):
        images = [image for image, _ in samples]
        matrix = torch.block_diag(*images) if self.is_one_graph else torch.stack(images)
        return {"inputs": matrix.to_sparse(layout=self.layout), "targets": torch.tensor([n for _, n in samples])}


class CompressedBatches(SparseBatches):
    layout = torch.sparse_csr


class OneGraph(SparseBatches):
    is_one_graph = True


class Mixed(OneGraph):
    def collate(self, samples):
        random.shuffle(samples)
        return super().collate(samples)


class OfSparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(64, 8), nn.Linear(8, 10)

    def forward(self, inputs):
        hidden = inputs @ self.layer.weight.t() if inputs.shape[1] == 64 else _by_block(inputs) @ self.layer.weight.t()
        return self.head(F.dropout(hidden, 0.2, self.training))


def _by_block(matrix):
    return matrix.to_dense().view(len(matrix), -1, 64).sum(1)


OF_SPARSE = (*runs.own_model("test_recorded_checks.OfSparse"), HERE, "~data.augment", "data.num_workers=0")


@pytest.mark.parametrize("kind", ["SparseBatches", "CompressedBatches"])
def test_sparse_tensors_of_a_batch_are_compared(tmp_path, kind):
    sparse = (*OF_SPARSE, f"data._target_=test_recorded_checks.{kind}")
    told = checks_of(tmp_path, *sparse, "task=own_tasks.total")
    assert told["draws in training"] == "all belong to samples"
    assert told["loss"] == told["loss in training"] == IN_DOUBLE
    assert "is a mean" in runs.refusal(tmp_path, *sparse, "task=own_tasks.mean")
    balanced = "task=test_recorded_checks.with_a_term_of_the_batch"
    assert "not a sum over samples" in runs.refusal(tmp_path, *sparse, balanced)


def with_a_term_of_the_batch(model, batch):
    loss, count, _ = total(model, batch)
    return loss + 0.1 * loss.square(), count, {}


def test_batches_that_are_not_their_halves_joined(tmp_path):
    graph = (*OF_SPARSE, "data._target_=test_recorded_checks.OneGraph")
    told = checks_of(tmp_path, *graph, "task=own_tasks.total")
    assert told["loss"] == "adds up over 4 samples collated in halves, as does its count, in fp64, with noise too"
    assert "padding" not in told
    assert told["draws in training"].startswith("not tried: a batch is not its halves joined; the first dimension")
    assert "is a mean" in runs.refusal(tmp_path, *graph, "task=own_tasks.mean")
    told = checks_of(tmp_path, *OF_SPARSE, "data._target_=test_recorded_checks.Mixed", "task=own_tasks.total")
    reason = "the data's `collate` draws random numbers"
    assert told["loss"].startswith(f"is no mean of 4 samples; no more is compared: {reason}, in fp64")


def per_pixel(model, batch):
    """Its count is of pixels, but its metric sums one value per sample."""
    logits, targets = model(batch["inputs"]), batch["targets"]
    right = (logits.argmax(1) == targets).float()
    return F.cross_entropy(logits, targets, reduction="sum"), 64 * len(targets), {"right": right.sum()}


def test_metrics_of_samples_are_noticed_in_batches_that_are_not_their_halves_joined(tmp_path, caplog):
    checks_of(tmp_path, *OF_SPARSE, "data._target_=test_recorded_checks.OneGraph", f"{TASK}per_pixel")
    assert "right sums one value per sample, but is divided by the count, which is 256 for 4 samples" in caplog.text


# --- nested tensors


class Nested(nn.Module):
    """A table of two rows of different lengths, and a batch that becomes one in the forward."""

    def __init__(self, num_classes: int, layout: str = "jagged", place: str = "buffer"):
        super().__init__()
        self.layer, self.head, self.layout = nn.Linear(8, 16), nn.Linear(16, num_classes), getattr(torch, layout)
        table = torch.nested.nested_tensor([torch.ones(10), torch.ones(6)], layout=self.layout)
        if place == "attribute":
            self.table = table
        else:
            self.register_buffer("table", table, persistent=place == "buffer")

    def forward(self, inputs):
        rows = [image.view(8, 8)[: 4 + int(16 * image.sum()) % 2] for image in inputs]
        hidden = self.layer(torch.nested.as_nested_tensor(rows, layout=self.layout))
        pooled = torch.stack([row.sum(0) for row in hidden.unbind()])
        return self.head(F.dropout(pooled * self.table.values(), 0.2, self.training))


@pytest.mark.parametrize(("layout", "place"), [("jagged", "buffer"), ("jagged", "attribute"), ("strided", "attribute")])
def test_nested_tensors(tmp_path, layout, place):
    nested = (*runs.own_model("test_recorded_checks.Nested"), f"+model.layout={layout}", f"+model.place={place}", HERE)
    told = checks_of(tmp_path, *nested, "data=digits", "task=own_tasks.total")
    assert told["loss"] == told["loss in training"] == IN_DOUBLE
    assert told["draws in training"] == "all belong to samples"
    assert "is a mean" in runs.refusal(tmp_path, *nested, "data=digits", "task=own_tasks.mean")
    assert runs.run(tmp_path, *runs.STEPS_ONLY, *nested, "data=digits", "task=own_tasks.total").steps == 4


# --- what is not compared, and why


class Few(SparseBatches):
    def __init__(self, split: str):
        super().__init__(split, size=1)


class Broken(SparseBatches):
    def __getitem__(self, index):
        raise OSError("no such image\nand more")


def raising(model, batch):
    raise LookupError("no key 'mask'\nand more")


def not_finite(model, batch):
    loss, count, _ = total(model, batch)
    return loss * float("nan"), count, {}


def drawing_in_python(model, batch):
    noise = torch.tensor([random.random() for _ in batch["targets"]]).view(-1, 1, 1, 1)
    return total(model, {**batch, "inputs": batch["inputs"] * noise})


def drawing_by_its_own_generator(model, batch):
    noise = torch.randn(batch["inputs"].shape, generator=torch.Generator().manual_seed(len(batch["targets"])))
    return total(model, {**batch, "inputs": batch["inputs"] + noise})


class Counting(nn.Module):
    """Its result depends on how many forwards there were in training, and on the batch."""

    def __init__(self, num_classes: int):
        super().__init__()
        self.layer, self.calls = nn.Linear(64, num_classes), 0

    def forward(self, inputs):
        self.calls += self.training
        return self.layer(inputs.flatten(1)) * len(inputs) ** self.calls  # 1 in evaluation


def whole(model, batch):
    return total(model, batch)


whole.whole_batch = True


class Embedding(EmbeddingTask):
    def embed(self, model, batch):
        return model(batch["inputs"])

    def loss_of_embeddings(self, embeddings):
        return embeddings.square().sum(), len(embeddings), {}


def of_metric(value):
    def task(model, batch):
        loss, count, _ = total(model, batch)
        return loss, count, {"right": 1.0 * count, "mine": value}

    return task


not_a_number = of_metric(float("nan"))


def with_a_metric_that_fails(model, batch):
    loss, count, _ = total(model, batch)
    return loss, count, {"mine": lambda: batch["masks"]}


def fp32_only(model, batch):
    return total(lambda inputs: model(inputs.flatten(1) @ FP32), batch)


FP32 = torch.eye(64)
STREAM = ("data._target_=own_streams.Plain", "~data.augment", "data.num_workers=0", "train.max_steps=3")
REASONS = {
    "one sample": (
        (*OF_SPARSE, "data._target_=test_recorded_checks.Few", "task=own_tasks.total"),
        "fewer than two samples",
    ),
    "no sample": (
        (*OF_SPARSE, "data._target_=test_recorded_checks.Broken", "task=own_tasks.total"),
        "the first samples cannot be fetched: OSError: no such image",
    ),
    "the task raises": ((*NET, f"{TASK}raising"), "LookupError: no key 'mask'"),
    "not finite": ((*NET, f"{TASK}not_finite"), "the loss or its count is not finite"),
    "Python's draws": ((*NET, f"{TASK}drawing_in_python"), "draws from Python's or NumPy's generator"),
    "own generator": ((*NET, f"{TASK}drawing_by_its_own_generator"), "draws whose samples are not known"),
    "unchecked": ((*NET, f"{TASK}total", "train.check_loss=false"), "train.check_loss=false"),
    "whole batch": ((*NET, f"{TASK}whole"), "the task declares whole_batch, its batch is never split"),
    "embeddings": ((*NET, f"{TASK}Embedding"), "an embedding loss compares the samples of the whole step"),
}


@pytest.mark.parametrize("name", REASONS)
def test_the_reason_is_told(tmp_path, name):
    overrides, reason = REASONS[name]
    told = checks_of(tmp_path, *overrides)
    for mode in ("loss", "loss in training"):
        assert told[mode].partition(", with noise")[0] == f"not compared: {reason}"


DRAWS = {
    "one sample": "not tried: fewer than two samples",
    "no sample": "not tried: the first samples cannot be fetched: OSError: no such image",
    "the task raises": UNKNOWN.format("LookupError: no key 'mask'"),
    "Python's draws": "Python's or NumPy's of the micro-batch",
    "own generator": "the forward draws from a generator of its own",
    "whole batch": "of the whole batch: the task declares whole_batch, it is never split",
    "embeddings": "none",
}


@pytest.mark.parametrize("name", DRAWS)
def test_what_is_known_of_the_draws_is_told(tmp_path, name):
    told = checks_of(tmp_path, *REASONS[name][0])
    assert told["draws in training"] == DRAWS[name]


def test_torchs_own_draws_are_told(tmp_path):
    told = checks_of(tmp_path, *NET, f"{TASK}total", "train.draws=device")
    assert told["draws"] == told["draws in training"] == "torch's own, of the micro-batch: train.draws=device on cpu"


def shuffled(model, batch):
    order = torch.randperm(len(batch["targets"]))
    noise = F.dropout(torch.rand(3).expand(len(order), 3), 0.2).sum() * 0 + torch.randint(9, (3,)).sum() * 0
    return total(model, {name: values[order] for name, values in batch.items()})[0] + noise, len(order), {}


def test_draws_that_do_not_belong_to_samples_are_told(tmp_path):
    told = checks_of(tmp_path, *NET, f"{TASK}shuffled")
    shared, varying = "shared by all samples: torch.randint, uniform_", "of the micro-batch: randperm"
    assert told["draws in training"] == f"{shared}; {varying}; the others belong to samples"


def test_a_resumed_run_tells_what_its_first_session_has_found(tmp_path):
    settings = (*runs.TINY, *NET, f"{TASK}shuffled", "objective=min loss", "train.check_loss=false")
    checks = []
    for steps in (1, 2, 3):
        runs.run(tmp_path, *settings, f"train.max_steps={steps}")
        checks.append(json.loads((tmp_path / "recipe.json").read_text())["checks"])
    assert "randperm" in checks[0]["draws in training"]
    assert checks[1] == checks[2] == checks[0]


def test_a_forward_that_writes_state(tmp_path):
    counting = (*runs.own_model("test_recorded_checks.Counting"), HERE, "data=digits", f"{TASK}total")
    told = checks_of(tmp_path, *counting)
    assert told["loss"] == METRICS
    assert told["loss in training"].startswith("not compared: the forward writes state (model.calls)")


@pytest.mark.parametrize(
    ("task", "note"),
    [
        ("not_a_number", "adds up over 4 samples, as do count and metrics (not mine: not finite or not in all"),
        ("with_a_metric_that_fails", "adds up over 4 samples, as does its count (metrics: KeyError: 'masks'), in fp64"),
    ],
)
def test_metrics_that_could_not_be_compared_are_told(tmp_path, task, note):
    assert checks_of(tmp_path, *NET, f"{TASK}{task}")["loss"].startswith(note)


def test_a_lower_precision_is_told(tmp_path):
    """With the reason why there was none higher."""
    told = checks_of(
        tmp_path,
        *runs.own_model("torch.nn.Linear"),
        "+model.in_features=64",
        "+model.out_features=10",
        HERE,
        "data=digits",
        f"{TASK}fp32_only",
    )
    assert told["loss"].startswith(
        "adds up over 4 samples, as do count and metrics, in fp32; not in fp64: RuntimeError: "
    )
    assert len(told["loss"]) > 100
    assert not told["loss"].endswith("...")  # whole: only the terminal's line is shortened


def test_a_resumed_run_tells_what_was_checked_before(tmp_path):
    told = checks_of(tmp_path, *NET, *STREAM, "task=own_tasks.total", resumes=True)
    assert told["loss"] == "not compared: a resumed run does not read its stream from the start"
    assert told["draws in training"] == "those of the resumed checkpoint"


def test_parameters_without_values():
    """As with `parallel.fsdp.meta_init`, whose ranks are processes."""
    assert not modes.has_all_values(nn.Linear(2, 2, device="meta"))
    assert modes.has_all_values(nn.Linear(2, 2))


def first(model, batch):
    return total(model, batch)


def second(model, batch):
    raise ValueError("in training only" if model.training else "at all")


def test_updates_have_names_of_their_own(tmp_path):
    updates = (
        "updates=[{name: body, task: test_recorded_checks.first, parameters: [layers.*]}, "
        "{name: head, task: test_recorded_checks.second, parameters: [head.*, log_vars]}]"
    )
    told = checks_of(tmp_path, *NET, f"{TASK}total", updates)
    assert told["loss"] == METRICS
    assert told["loss of update body"] == told["loss of update body in training"] == METRICS
    assert told["loss of update head"] == "not compared: ValueError: at all"
    assert told["loss of update head in training"] == "not compared: ValueError: in training only"
    assert told["draws of update body in training"] == "none"
    assert told["draws of update head in training"].startswith("not known: ValueError: in training only")


def of_two(model, batch):
    loss, count, metrics = own_tasks.total(model, batch)
    if count < 2:
        raise ValueError("a single sample")
    return loss, count, metrics


def test_what_does_not_run_a_single_sample_is_compared_in_halves_alone(tmp_path):
    told = checks_of(
        tmp_path, *runs.own_model("own_tasks.Net"), HERE, "data=digits", "task=test_recorded_checks.of_two"
    )
    refused = "the task or the model refuses 1 sample (ValueError: a single sample)"
    assert f"adds up over 4 samples, as does its count; compared in halves alone: {refused}" in told["loss"]
