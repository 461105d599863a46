"""A loss of embeddings has the gradients of the uncut batch, for any micro-batch; each of the three passes may fail."""

import own_tasks
import pytest
import runs
import torch
from faults import Fault
from harness import Recorded
from helpers import ROOT, evaluations
from markdown import write_files
from own_tasks import Encoder, Mirrored, infonce

from trainapp.errors import TrainingStopped, UserError
from trainapp.state.snapshot import Snapshot
from trainapp.training import cached_gradients, loop

pytestmark = pytest.mark.usefixtures("one_thread")
OWN = (
    *("model=mlp", "user_packages=[own_tasks,test_cached_gradients]", "model._target_=own_tasks.Encoder"),
    *("~model.depth", "model.width=16", "model.dropout=0.3", "data=digits", "objective=min loss", "oom.grow=false"),
    *("train.grad_clip=null", "schedule=constant", "batch.global_size=32", "checkpointing=off"),
)
STEADY = ("model.dropout=0.0", "+model.norm=false")  # does not depend on how a batch is cut
MIRRORED = "task=own_tasks.mirrored"


def prepared(path, *overrides):
    run = runs.prepare(path, *OWN, *overrides)
    run.snapshot.take()  # as a transaction does
    return run


def batches(run, size):
    """The samples of the coming step, in micro-batches of so many."""
    indices = run.batches.share(run.state.progress).numbers
    return [run.batches.dataset.__getitems__(indices[i : i + size]) for i in range(0, len(indices), size)]


def of_uncut_loss(run, size, task=own_tasks.mirrored):
    """The gradients of the loss of all embeddings, with every graph in memory at once."""
    found = [task.embed(run.state.model, batch) for batch in batches(run, size)]
    loss, count, _ = task.loss_of_embeddings({name: torch.cat([part[name] for part in found]) for name in found[0]})
    run.state.model.zero_grad()
    (loss / count).backward()
    return runs.gradients(run.state.model), float(loss.detach())


@pytest.mark.parametrize("size", [5, 32])
def test_the_gradient_is_that_of_the_uncut_batch(tmp_path, size):
    run = prepared(tmp_path, *STEADY, MIRRORED, f"batch.micro_size={size}")
    totals = runs.accumulate(run, is_logged=True)
    found = runs.gradients(run.state.model)  # divided by the samples, which is the count
    expected, loss = of_uncut_loss(run, 32)
    run.close()
    assert runs.relative_error(found, expected) < 1e-6
    assert (float(totals.loss), totals.count) == (pytest.approx(loss, rel=1e-6), 32)
    assert totals.metrics.keys() == {"own"}


def test_the_loss_of_each_micro_batch_is_another(tmp_path):
    """Negative control."""
    wrong = ("task=own_tasks.per_micro_batch", "train.check_loss=false", "batch.micro_size=8")
    run = prepared(tmp_path, *STEADY, *wrong)
    runs.accumulate(run)
    found = runs.gradients(run.state.model)
    expected, _ = of_uncut_loss(run, 32)
    run.close()
    assert runs.relative_error(found, expected) > 0.1


def test_what_a_forward_draws_and_writes(tmp_path):
    """Dropout drops the same in both passes; BatchNorm and generators are as after one."""
    run = prepared(tmp_path, MIRRORED, "batch.micro_size=8", "train.draws=device")
    model = run.state.model
    run.engine.seed(run.begin_update())
    runs.accumulate(run)
    found, buffers = runs.gradients(model), [buffer.clone() for buffer in model.buffers()]
    own = model.generator.get_state()
    run.snapshot.restore()
    run.engine.seed(run.begin_update())
    expected, _ = of_uncut_loss(run, 8)
    run.close()
    assert runs.relative_error(found, expected) < 1e-6
    assert all(map(torch.equal, buffers, model.buffers()))
    assert torch.equal(own, model.generator.get_state())
    fresh, _ = of_uncut_loss(run, 8)  # negative control: with other draws
    assert runs.relative_error(found, fresh) > 0.05


def test_a_pass_that_is_not_the_same_is_an_error(tmp_path, monkeypatch):
    """Negative control: the third pass from other generators."""
    monkeypatch.setattr(Snapshot, "restore_generators", lambda self: None)
    monkeypatch.setattr(cached_gradients, "seed_from", lambda *_: None)
    run = prepared(tmp_path, MIRRORED, "batch.micro_size=8")
    with pytest.raises(UserError, match="is not deterministic: calling it twice"):
        runs.accumulate(run)
    run.close()


def weights(path, *overrides):
    run = runs.run_until(path, 3, *OWN, "train.max_steps=3", *overrides)
    run.close()
    return run, runs.weights(run.state.model)


# Each of four micro-batches has 26 operations of the model and 12 of its embeddings; 8 are the loss of all.
PLACES = {"first pass": ("forward", 40), "loss": ("loss", 52), "third pass": ("forward", 130)}


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_out_of_memory_in_each_pass(tmp_path, place):
    phase, operation = PLACES[place]
    chosen = (*OWN, MIRRORED, "train.max_steps=3")
    config = runs.configure(tmp_path / "failed", *chosen, "batch.micro_size=8")
    failed = Recorded(config, Fault(phase, 2, operation))
    assert (len(failed.failures), failed.result.micro_schedule) == (1, {1: 8, 2: 4})
    replay = Recorded(runs.configure(tmp_path / "replay", *chosen, "batch.micro_schedule={1: 8, 2: 4}"))
    assert runs.differences(failed.record(), replay.record()) == []
    other = Recorded(runs.configure(tmp_path / "other", *chosen, "batch.micro_size=8"))
    assert runs.differences(other.record().state["model"], replay.record().state["model"])  # dropout depends on the cut


SAME = {
    "in backward": ("optimizer.in_backward=true",),
    "checkpointed": ("activation_checkpointing=full",),
    "checked": ("train.check_exactness=true",),
}


@pytest.mark.parametrize("kind", SAME)
def test_bit_for_bit_the_same_with(tmp_path, kind):
    _, plain = weights(tmp_path / "plain", MIRRORED, "batch.micro_size=8")
    _, found = weights(tmp_path / "other", MIRRORED, "batch.micro_size=8", *SAME[kind])
    assert torch.equal(found, plain)


def test_half_precision(tmp_path):
    """Cut as uncut, to the precision's rounding; fp16's scale reaches the embeddings."""
    chosen = (*STEADY, MIRRORED, "precision=fp16")
    whole, expected = weights(tmp_path / "whole", *chosen, "batch.micro_size=32")
    cut, found = weights(tmp_path / "cut", *chosen, "batch.micro_size=8")
    start = runs.weights(runs.closed(tmp_path / "fresh", *OWN, *chosen).state.model)
    assert runs.relative_error(found - start, expected - start) < 0.08
    assert cut.state.precision.scaler.get_scale() == whole.state.precision.scaler.get_scale()
    assert cut.state.progress.skipped == whole.state.progress.skipped


class Drawing(Mirrored):
    """The loss draws random numbers, and counts."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(7)
        self.seen = 0

    def loss_of_embeddings(self, embeddings):
        self.seen += 1
        first = embeddings["first"] + 0.1 * torch.randn(embeddings["first"].shape)
        return infonce(first + 0.1 * torch.rand((), generator=self.generator), embeddings["second"])

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


def test_what_the_loss_draws_and_keeps(tmp_path):
    """The same for every micro-batch; its state moves once per step."""
    chosen = (*STEADY, "task=test_cached_gradients.Drawing", "every.log=1")
    run, whole = weights(tmp_path / "whole", *chosen, "batch.micro_size=32")
    assert run.task.unchecked.seen == 3
    run, cut = weights(tmp_path / "cut", *chosen, "batch.micro_size=8")
    torch.testing.assert_close(cut, whole, rtol=1e-4, atol=1e-6)
    assert "task" not in "".join(run.engine.draw_record.depends.values())


UPDATES = (
    "updates=[{name: body, task: own_tasks.mirrored, parameters: [body, scale], optimizer: {lr: 0.01}}, "
    "{name: head, task: own_tasks.total, parameters: [head], optimizer: {lr: 0.01}}]"
)


def test_one_of_several_updates(tmp_path):
    """Each cut by itself."""
    chosen = (*STEADY, UPDATES, "task=own_tasks.total")
    whole, expected = weights(tmp_path / "whole", *chosen, "batch.micro_size=32")
    _, found = weights(tmp_path / "cut", *chosen, "batch.micro_size=8")
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    model, fresh = whole.state.model, runs.closed(tmp_path / "fresh", *OWN, *chosen).state.model
    assert not torch.equal(runs.weights(model.body), runs.weights(fresh.body))
    assert not torch.equal(runs.weights(model.head), runs.weights(fresh.head))


def test_the_evaluation_does_not_depend_on_its_micro_batch(tmp_path):
    """Of as many samples at a time as in training."""
    found = {}
    for size in (7, 32, 360):
        run = runs.prepare(tmp_path / str(size), *OWN, *STEADY, MIRRORED, f"batch.eval_micro_size={size}")
        loop.evaluate(run)
        found[size] = run.evaluation.last
        model, data = run.state.model.eval(), run.eval_sets[""].dataset
        run.close()
    with torch.no_grad():
        chunks = [data.__getitems__(range(i, min(i + 32, len(data)))) for i in range(0, len(data), 32)]
        expected = sum(float(own_tasks.mirrored(model, chunk)[0]) for chunk in chunks) / len(data)
    assert [each["loss"] for each in found.values()] == [pytest.approx(expected, rel=1e-5)] * 3
    assert found[7].keys() == {"loss", "own"}


class Views(Mirrored):
    """Two rows per sample."""

    def embed(self, model, batch):
        found = super().embed(model, batch)
        return torch.cat([found["first"], found["second"]])


class Nothing(Mirrored):
    def embed(self, model, batch):
        return {}


class Direct(Mirrored):
    """The loss depends on a parameter directly."""

    def embed(self, model, batch):
        self.scale = model.scale
        return super().embed(model, batch)

    def loss_of_embeddings(self, embeddings):
        loss, count, _ = super().loss_of_embeddings(embeddings)
        return loss * self.scale.exp().sum(), count, {}


REFUSED = {
    "Views": "whose first dimension is the samples, 8, but returned a Tensor with tensors of shapes [[16, 10]]",
    "Nothing": "its embed must return a tensor",
    "Direct": "its loss_of_embeddings depends on a parameter of shape [1]",
}


@pytest.mark.parametrize("task", REFUSED)
def test_what_cannot_be_joined_or_repeated(tmp_path, task):
    message = runs.refusal(tmp_path, *OWN, f"task=test_cached_gradients.{task}", "batch.micro_size=8")
    assert message.startswith(f"task=test_cached_gradients.{task}: ")
    assert REFUSED[task] in message


class Teaching(Encoder):
    """A momentum teacher in parameters, which every forward writes."""

    def __init__(self, num_classes: int, width: int = 16, dropout: float = 0.0):
        super().__init__(num_classes, width, dropout, norm=False)
        self.teacher = torch.nn.Linear(width, num_classes).requires_grad_(False)

    def forward(self, inputs):
        with torch.no_grad():
            self.teacher.weight.lerp_(self.head.weight, 0.1)
        return super().forward(inputs)


def test_parameters_that_a_forward_writes(tmp_path):
    """They would be written twice."""
    with pytest.raises(TrainingStopped, match=r"its embed writes parameters in place \(model.teacher.weight\)"):
        runs.run(tmp_path, *OWN, "model._target_=test_cached_gradients.Teaching", MIRRORED, "batch.micro_size=8")


def test_the_shipped_task_learns(tmp_path):
    """Untrained, the second view of an image is found among 360 by chance and likeness."""
    chosen = ("model=mlp", "model.width=128", "data._target_=trainapp.data.sets.digits.DigitPairs", "optimizer.lr=0.01",
              "batch.global_size=256", "batch.micro_size=64", "train.max_steps=80", "every.log=40", "every.eval=20",
              "every.save=null", "train.grad_clip=null")  # fmt: skip
    result = runs.run(tmp_path, *chosen)
    first, *_, last = (line["accuracy"] for line in evaluations(tmp_path))
    assert result.steps == 80
    assert last > first + 0.05


def test_the_task_of_the_documentation(tmp_path, monkeypatch):
    assert "my_project/my_matching.py" in write_files(ROOT / "docs/extending.md", tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "my_project")
    chosen = ("user_packages=[my_matching]", "task=my_matching.Matching", "batch.micro_size=8", "checkpointing=off")
    assert runs.run(tmp_path / "run", *runs.MODELS["mlp"], *chosen).steps == 4


def test_views_are_needed(tmp_path):
    with pytest.raises(UserError, match=r"inputs of shape \[samples, 2, ...\], two views of each sample, but") as no:
        runs.run(tmp_path, *runs.MODELS["mlp"], "task=contrastive")
    assert str(no.value).endswith("data._target_=trainapp.data.sets.digits.DigitPairs has them")
