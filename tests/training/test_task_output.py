"""`task.output`: the part of a model's output that a built-in loss, prediction and generation read."""

import functools
import math
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import helpers
import pytest
import runs
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainapp.config import compose
from trainapp.errors import UserError
from trainapp.losses import losses
from trainapp.run import resume

PACKAGES = "user_packages=[test_task_output]"


@dataclass
class Returned:
    """As of models that return a dataclass."""

    scores: Tensor
    hidden: Tensor


class Named(NamedTuple):
    """As of torchvision's Inception."""

    logits: Tensor
    hidden: Tensor


class Forms(nn.Module):
    """A classifier that returns its logits and something else, in several forms."""

    def __init__(self, num_classes: int, form: str = "tensor"):
        super().__init__()
        self.linear, self.form = nn.Linear(64, num_classes), form

    def forward(self, inputs: Tensor) -> Any:
        hidden = inputs.flatten(1)
        logits = self.linear(hidden)
        return {
            "tensor": logits,
            "tuple": (logits, hidden),
            "last": [hidden, logits],
            "with_none": (logits, None),
            "dict": {"scores": logits, "hidden": hidden},
            "default": {"logits": logits, "hidden": hidden},
            "dataclass": Returned(logits, hidden),
            "namedtuple": Named(logits, hidden),
            "in_training": (logits, hidden) if self.training else logits,
        }[self.form]


class NanoGPT(nn.Module):
    """As nanoGPT: without targets, the logits of the last position alone."""

    def __init__(self, vocab_size: int, context_length: int, width: int = 16):
        super().__init__()
        self.context_length = context_length
        self.embedding, self.head = nn.Embedding(vocab_size, width), nn.Linear(width, vocab_size)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        hidden = self.embedding(idx)
        if targets is None:
            return self.head(hidden[:, [-1], :]), None
        logits = self.head(hidden)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


def own_loss(model: nn.Module, batch: Any) -> Any:
    """A loss that reads the model's output itself."""
    logits, targets = model(batch["inputs"])[0], batch["targets"]
    return F.cross_entropy(logits, targets, reduction="sum"), len(targets), {}


def scored(model: nn.Module, batch: Any, output: str = "scores") -> Any:
    """A loss with an argument `output` of its own."""
    return F.cross_entropy(model(batch["inputs"])[output], batch["targets"], reduction="sum"), len(batch["targets"]), {}


def of(form: str, *overrides: str) -> tuple[str, ...]:
    own = runs.own_model("test_task_output.Forms")
    return (*own, f"+model.form={form}", "data=digits", PACKAGES, "every.eval=2", *overrides)


TEXT = (
    *runs.own_model("test_task_output.NanoGPT"),
    *("data=text", "data.context_length=16", PACKAGES, "task.output=0", "every.eval=2", "optimizer.lr=0.01"),
)


def losses_of(folder):
    return [line["loss"] for line in helpers.metrics(folder)]


@pytest.mark.parametrize(
    ("form", "output"),
    [
        ("tuple", "0"),
        ("last", "1"),
        ("last", "-1"),
        ("with_none", "0"),
        ("dict", "scores"),
        ("dataclass", "scores"),
        ("namedtuple", "0"),
        ("namedtuple", "logits"),
        ("in_training", "0"),
        ("tensor", "0"),
    ],
)
def test_the_chosen_part_is_trained_and_evaluated_as_a_tensor_is(tmp_path, form, output):
    runs.run(tmp_path / "plain", *of("tensor"))
    ended = runs.run(tmp_path / "part", *of(form, f"task.output={output}", "batch.micro_size=6"))
    assert losses_of(tmp_path / "part") == pytest.approx(losses_of(tmp_path / "plain"), rel=1e-5)
    plain = helpers.evaluations(tmp_path / "plain")
    assert [line["accuracy"] for line in helpers.evaluations(tmp_path / "part")] == [line["accuracy"] for line in plain]
    assert ended.steps == 4


@pytest.mark.parametrize("form", ["default", "namedtuple"])
def test_what_is_called_logits_needs_no_setting(tmp_path, form):
    assert runs.run(tmp_path, *of(form)).steps == 4


@pytest.mark.parametrize(
    ("form", "output", "message"),
    [
        (
            "tuple",
            (),
            r"the model returns \(torch\.float32\[16, 10\], torch\..*, of which this loss reads one tensor; ",
        ),
        ("tuple", (), r"choose it by its index or name, such as task\.output=0$"),
        ("dict", (), r"such as task\.output=scores$"),
        ("dataclass", (), r"the model returns Returned, .* such as task\.output=scores$"),
        ("tuple", ("task.output=2",), r"^task\.output=2: the model returns \(.*, which has no such part; .* of 0, 1$"),
        ("dict", ("task.output=logits",), r"^task\.output=logits: .* choose one of scores, hidden$"),
        ("dataclass", ("task.output=0",), r"^task\.output=0: .* choose one of scores, hidden$"),
        ("with_none", ("task.output=1",), r"^task\.output=1: .* reads one tensor; .* task\.output=0$"),
        ("tuple", ("task.output=1.5",), r"task\.output=1\.5: must be a valid integer"),
        ("tuple", ("task.outptu=0",), r"task\.outptu: no such setting; did you mean 'output'"),
        ("tuple", ("task=test_task_output.own_loss", "task.output=[0]"), r"task\.output=\[0\]: must be the index or"),
    ],
)
def test_mistakes_name_the_setting(tmp_path, form, output, message):
    with pytest.raises(UserError) as refused:
        runs.run(tmp_path, *of(form, *output))
    assert re.search(message, str(refused.value).removesuffix("\nat step 1"))


def test_predictions_of_the_chosen_part(tmp_path):
    runs.run(tmp_path / "plain", *of("tensor", "every.save=4"))
    runs.run(tmp_path / "part", *of("last", "task.output=1", "every.save=4"))
    plain = runs.infer("predict", tmp_path, tmp_path / "plain", PACKAGES, output="plain.jsonl")
    assert plain[0].keys() >= {"prediction", "probability"}
    assert runs.infer("predict", tmp_path, tmp_path / "part", PACKAGES, output="part.jsonl") == plain


def test_it_can_be_chosen_for_a_loss_that_does_not_take_it(tmp_path):
    """Its task stays the run's: only predictions read the setting."""
    runs.run(tmp_path / "run", *of("tuple", "task=test_task_output.own_loss", "every.save=4", "objective=min loss"))
    both = runs.infer("predict", tmp_path, tmp_path / "run", PACKAGES)
    assert len(both[0]["prediction"]) == 2
    chosen = runs.infer("predict", tmp_path, tmp_path / "run", PACKAGES, "task.output=0", output="chosen.jsonl")
    assert 0 <= chosen[0]["prediction"] < 10
    config = runs.configure(
        tmp_path, "mode=eval", f"checkpointing.resume={tmp_path / 'run'}", PACKAGES, "task.output=0"
    )
    saved = resume.as_saved(config, runs.checkpoint(tmp_path / "run", 4))
    assert (saved.task, saved.task_arguments) == ("test_task_output.own_loss", {"output": 0})


def test_a_loss_with_such_an_argument_of_its_own_gets_it(tmp_path):
    task = ("task=test_task_output.scored", "objective=min loss")
    assert runs.run(tmp_path / "default", *of("dict", *task)).steps == 4
    with pytest.raises(KeyError, match="logits"):
        runs.run(tmp_path / "own", *of("dict", *task, "task.output=logits"))


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text.txt").write_text("import os\nimport sys\ndef f(self, x):\n    return x + 1\n" * 60)
    return f"data.files={tmp_path / 'text.txt'}"


def test_a_model_that_wants_the_targets_for_all_logits(tmp_path, text):
    """nanoGPT: trained and evaluated on all positions, as is the same model without its peculiarity."""
    run = runs.prepare(tmp_path / "run", *TEXT, text, "every.save=4")
    batch = run.batches.example(2)
    loss, count, _ = run.engine.evaluated_task(run.state.model, batch)
    logits, mean = run.state.model(batch["inputs"], batch["targets"])
    run.close()
    assert int(count) == 2 * 16
    assert float(loss.detach()) == pytest.approx(float(mean.detach()) * 32, rel=1e-5)
    assert runs.run(tmp_path / "run", *TEXT, text, "every.save=4").steps == 4
    assert losses_of(tmp_path / "run")[-1] < losses_of(tmp_path / "run")[0] < 1.2 * math.log(logits.shape[-1])


def test_text_of_such_a_model(tmp_path, text):
    runs.run(tmp_path / "run", *TEXT, text, "every.save=4")
    chosen = (PACKAGES, 'generate.prompts=["import ","x"]', "generate.max_new_tokens=8", "generate.temperature=0")
    rows = runs.infer("generate", tmp_path, tmp_path / "run", *chosen)
    assert [len(row["tokens"]) for row in rows] == [8, 8]
    with pytest.raises(UserError, match=r"the model returns \(.*, of which mode=generate reads one tensor; .*output=0"):
        runs.infer("generate", tmp_path, tmp_path / "run", *chosen, "task.output=null", output="none.jsonl")


@pytest.mark.parametrize(
    ("overrides", "task", "arguments"),
    [
        (["task.output=0"], "auto", {"output": 0}),
        (["+task.output=logits"], "auto", {"output": "logits"}),
        (["task=next_token", "task.output=0"], "next_token", {"output": 0}),
        (["task.output=0", "task=next_token"], "next_token", {"output": 0}),
        (["task.output=0", "task._target_=next_token"], "next_token", {"output": 0}),
        (
            ["task={_target_: contrastive, temperature: 1}", "task.output=0"],
            "contrastive",
            {"temperature": 1, "output": 0},
        ),
        (["task={_target_: a.B, part: {c: 1, d: 2}}", "task.part.d=3"], "a.B", {"part": {"c": 1, "d": 3}}),
        (["task={_target_: a.B, c: 1}", "~task.c"], "a.B", {}),
    ],
)
def test_arguments_of_the_task_on_the_command_line(overrides, task, arguments):
    config = compose.from_command_line(overrides)
    assert (config.task, config.task_arguments) == (task, arguments)
    shown = [text for text in overrides if text.lstrip("+").startswith("task.output")]
    assert all(text.lstrip("+") in config.command for text in shown)


@pytest.mark.parametrize("task", ["next_token", "{_target_: next_token, temperature: 1}"])
def test_a_task_from_a_yaml_file_keeps_its_name(tmp_path, task):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/mine.yaml").write_text(f"# @package _global_\ntask: {task}\n")
    config = compose.from_command_line(["experiment=mine", "task.output=0"], config_dir=tmp_path)
    assert (config.task, config.task_arguments["output"]) == ("next_token", 0)
    assert "task.output" in config.given


@pytest.mark.parametrize("task", ["next_token", "{_target_: contrastive, temperature: 1}"])
def test_another_task_replaces_that_of_a_yaml_file(tmp_path, task):
    """With all of its arguments, and with arguments that the file's does not have."""
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/mine.yaml").write_text(f"# @package _global_\ntask: {task}\n")
    other = "task={_target_: a.B, at: {step: 32}}"
    config = compose.from_command_line(["experiment=mine", other, "task.at.step=33"], config_dir=tmp_path)
    assert (config.task, config.task_arguments) == ("a.B", {"at": {"step": 33}})
    assert other in config.command


def test_only_logits_alone_can_be_computed_in_chunks():
    with pytest.raises(UserError, match=r"memory\.loss_chunk=8: .*task\.output"):
        compose.from_command_line(["model=gpt", "data=text", "memory.loss_chunk=8", "task.output=0"])
    assert losses.can_be_chunked(losses.classification)
    chosen = functools.partial(losses.classification, output=0)
    assert losses.is_built_in(chosen)
    assert losses.class_dim(chosen) == 1
    assert not losses.can_be_chunked(chosen)


@pytest.mark.slow
def test_in_a_sweep_by_the_command_line(tmp_path):
    """The table names the setting as it was written, and a job can be repeated."""
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self, num_classes):\n"
        "        super().__init__()\n"
        "        self.one, self.two = nn.Linear(64, num_classes), nn.Linear(64, num_classes)\n"
        "    def forward(self, images):\n"
        "        return self.one(images.flatten(1)), self.two(images.flatten(1))\n"
    )
    own = ("data=digits", "model._target_=mine.Net", "user_packages=[mine]", "tracker=[]", *runs.TINY, "every.eval=4")
    done = helpers.run_cli("-m", "task.output=0,1", *own, f"hydra.sweep.dir={tmp_path / 'sweep'}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "task_arguments" not in done.stdout + done.stderr
    assert "task.output" in (tmp_path / "sweep/leaderboard.csv").read_text()
    assert "task.output: 0, 1" in done.stdout
    assert "task.output=0" in (tmp_path / "sweep/0/.hydra/overrides.yaml").read_text()
    again = helpers.run_cli("rerun", "sweep/1", "train.seed=1", "hydra.run.dir=again", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert "output: 1" in (tmp_path / "again/.hydra/config.yaml").read_text()


class Masked:
    """As minGPT's task of sorting: the first half of each sequence is only read, not predicted."""

    task = "next_token"
    in_memory = True

    def __init__(self, split: str, ignored: int = -100, vocab_size: int = 5, length: int = 8):
        self.spec = {"vocab_size": vocab_size, "context_length": length}
        self.ignored = ignored
        self.tokens = torch.randint(vocab_size, (24, length + 1), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        targets = self.tokens[index, 1:].clone()
        targets[: len(targets) // 2 - index % 3] = self.ignored
        return {"inputs": self.tokens[index, :-1], "targets": targets}


MASKED = (
    *runs.own_model("test_task_output.NanoGPT"),
    *("data={_target_: test_task_output.Masked}", PACKAGES, "task.output=0", "every.eval=2", "optimizer.lr=0.01"),
)


def masked_loss(model: nn.Module, batch: Any) -> Any:
    """The loss that `next_token` should have with `Masked`."""
    logits, _ = model(batch["inputs"], batch["targets"].clamp(min=0))
    is_counted = batch["targets"] != -100
    loss = F.cross_entropy(logits[is_counted], batch["targets"][is_counted], reduction="sum")
    return loss, is_counted.sum(), {}


@pytest.mark.parametrize("micro_size", ["auto", "5"])
def test_a_model_whose_own_loss_ignores_another_target(tmp_path, micro_size):
    runs.run(tmp_path / "run", *MASKED, f"batch.micro_size={micro_size}")
    own = [text for text in MASKED if not text.startswith("task")]
    runs.run(tmp_path / "own", *own, "task=test_task_output.masked_loss")
    assert losses_of(tmp_path / "run") == pytest.approx(losses_of(tmp_path / "own"), rel=1e-5)


def test_ignored_targets_of_another_value_are_refused_by_name(tmp_path):
    with pytest.raises(UserError, match=r"^task=next_token: a target is -1, .* write -100 for what is ignored"):
        runs.run(tmp_path, *MASKED, "data.ignored=-1")
