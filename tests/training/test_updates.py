"""Several optimizers: updates in turn, each a transaction of its own, some of them only in every Nth step. Errors in
either: tests/zoo.
"""

import copy
import sys
from pathlib import Path

import own_hooks
import pytest
import runs
import torch
from faults import Fault
from harness import Recorded
from helpers import metrics, result, run_cli
from runs import end
from zoo.gans import discriminate, generate

from trainapp.data.sampler import Permutation
from trainapp.errors import UserError
from trainapp.rng import seed_from
from trainapp.run import directory
from trainapp.run.prepare import SessionStart, prepare
from trainapp.training import loop
from trainapp.training.engine import Engine

TESTS = Path(__file__).resolve().parent.parent
DISCRIMINATOR = "{name: discriminator, task: zoo.gans.discriminate, parameters: [discriminator], optimizer: {lr: 0.02}}"
GENERATOR = (
    "{name: generator, task: zoo.gans.generate, parameters: [generator], "
    "optimizer: {_target_: torch.optim.SGD, lr: 0.05, momentum: 0.9}}"
)
UPDATES = f"updates=[{DISCRIMINATOR}, {GENERATOR}]"
PARTS = (
    *("user_packages=[zoo]", "model._target_=zoo.gans.GAN", "data._target_=zoo.data.Vectors", "task=zoo.gans.distance"),
    *("schedule=constant", "batch.micro_size=16"),
)
OWN = (*PARTS, UPDATES)
RARELY = (*PARTS, UPDATES.replace("name: generator", "name: generator, every: 3"))
SHIFTED = (*PARTS, UPDATES.replace("name: generator", "name: generator, every: 3, offset: 2"))
BOTH = pytest.mark.parametrize("own", [OWN, RARELY], ids=["in turn", "one in every third step"])
ALL = pytest.mark.parametrize("own", [OWN, RARELY, SHIFTED], ids=["in turn", "every third step", "with an offset"])


def by_hand(model, samples, is_due):
    """The loop that a user would write, with the same optimizers and the same clipping: its losses."""
    optimizers = {
        "discriminator": torch.optim.AdamW(model.discriminator.parameters(), lr=0.02, weight_decay=0.0),
        "generator": torch.optim.SGD(model.generator.parameters(), lr=0.05, momentum=0.9),
    }
    losses = {}
    for step, batch in enumerate(samples, start=1):
        for number, (name, task) in enumerate((("discriminator", discriminate), ("generator", generate))):
            if name == "generator" and not is_due(step):
                continue
            seed_from(torch.device("cpu"), 0, step, number, 0)
            model.zero_grad()
            loss, count, _ = task(model, batch)
            (loss / count).backward()
            torch.nn.utils.clip_grad_norm_(getattr(model, name).parameters(), 1.0)
            optimizers[name].step()
            losses[step, name] = (loss / count).item()
    return losses


@ALL
def test_it_is_the_loop_that_a_user_would_write(tmp_path, own):
    """A rare update is made in the first step and in every third; with an offset, only in steps 2, 5, ..."""
    run = runs.prepare(tmp_path, *own, "optimizer.weight_decay=0", "train.max_steps=7", "train.draws=device")
    model, data = copy.deepcopy(run.state.model), run.batches.dataset
    loop.train(run)
    run.close()
    steps = {OWN: range(1, 8), RARELY: (1, 3, 6), SHIFTED: (2, 5)}[own]
    orders = [Permutation(0, len(data)).indices(epoch, 0, len(data)) for epoch in range(3)]
    samples = [{"inputs": data.inputs[order[start : start + 16]]} for order in orders for start in (0, 16, 32)]
    losses = by_hand(model, samples[:7], lambda step: step in steps)
    names = ("discriminator", "generator")
    logged = {
        (line["step"], name): line[f"{name}/loss"]
        for line in metrics(tmp_path)
        for name in names
        if f"{name}/loss" in line
    }
    assert logged == pytest.approx(losses, rel=1e-4)
    torch.testing.assert_close(runs.weights(run.state.model), runs.weights(model), rtol=1e-4, atol=1e-6)
    assert run.state.progress.step == 7
    assert all(p.requires_grad for p in run.state.model.parameters())


def test_metrics_of_all_updates_are_logged_and_callbacks_called_once_per_step(tmp_path):
    own_hooks.SEEN.clear()
    hooks = ("+callbacks.mine={_target_: own_hooks.Records}", "user_packages=[zoo,own_hooks]")
    runs.run(tmp_path, *OWN, *hooks, "train.max_steps=2", "every.eval=2")
    assert [call[:2] for call in own_hooks.SEEN] == [("step", 1), ("step", 2), ("evaluation", 2), ("end", 2)]
    for line in metrics(tmp_path):
        assert {"discriminator/loss", "discriminator/right", "discriminator/grad_norm", "generator/loss"} <= line.keys()
        assert (line["discriminator/lr"], line["generator/lr"]) == (0.02, 0.05)
        assert line["loss"] == line["generator/loss"] != line["discriminator/loss"]
        assert line["generator/grad_norm"] != line["discriminator/grad_norm"]
    assert result(tmp_path)["metric"] == "loss"


@ALL
@pytest.mark.parametrize("stop", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, own, stop):
    settings = (*own, "train.max_steps=5", "every.eval=2", "train.ema=0.9")
    whole, resumed = runs.resumed(tmp_path, stop, *settings)
    assert runs.differences(resumed, whole) == []
    assert set(whole["optimizer"]) == {"discriminator", "generator"}
    assert "momentum_buffer" in whole["optimizer"]["generator"]["generator.0.weight"]


class Relative:
    """The generator's loss relative to a running mean of it: state that a retry and a checkpoint must know."""

    def __init__(self):
        self.mean = 1.0

    def __call__(self, model, batch):
        loss, count, sums = generate(model, batch)
        scale = self.mean
        if model.training:
            self.mean = 0.5 * self.mean + 0.5 * float(loss.detach()) / count
        return loss / scale, count, sums

    def state_dict(self):
        return {"mean": self.mean}

    def load_state_dict(self, state):
        self.mean = state["mean"]


@pytest.mark.slow
def test_the_state_of_an_updates_task_is_restored_and_saved(tmp_path):
    """After an error in its second micro-batch, and by a resume."""
    stateful = GENERATOR.replace("zoo.gans.generate", "test_updates.Relative")
    settings = (*updates(DISCRIMINATOR, stateful), "user_packages=[zoo,test_updates]", "batch.micro_size=8")
    settings += ("train.max_steps=4", "oom.grow=false")
    whole, resumed = runs.resumed(tmp_path, 2, *settings)
    assert runs.differences(whole, resumed) == []
    assert [*whole["stateful"][0]] == ["generator's task"]
    Recorded(runs.configure(tmp_path / "c", *settings), Fault("loss", 1, 6, update="generator"))
    schedule = "batch.micro_schedule={discriminator: {1: 8}, generator: {1: 4}}"
    runs.run(tmp_path / "d", *settings, schedule)
    assert runs.differences(end(tmp_path / "c", 4), end(tmp_path / "d", 4)) == []
    assert runs.differences(end(tmp_path / "c", 4)["stateful"], whole["stateful"]) != []


def test_a_stop_between_two_updates_waits_for_the_end_of_the_step(tmp_path, monkeypatch):
    """A signal during the first update of step 2: the step is finished and saved."""
    stop = runs.StopAt(99)
    run = prepare(SessionStart(runs.configure(tmp_path, *OWN)), stop, runs.SingleRank())
    stop.run, commit = run, Engine.commit

    def struck(engine, *rest):
        if (engine.context.step_number, engine.context.update.name) == (2, "discriminator"):
            stop.step = 0
        return commit(engine, *rest)

    monkeypatch.setattr(Engine, "commit", struck)
    loop.train(run)
    run.close()
    assert (run.state.progress.step, run.state.progress.update) == (2, 0)
    assert run.checkpointer.saved_at == 2


KILLED = """
import os, sys
sys.path.insert(0, {tests!r})
from trainapp.training.engine import Engine
from trainapp import __main__
commit = Engine.commit
def dying(engine, totals, norm):
    if (engine.context.step_number, engine.context.update.name) == (4, "generator"):
        os._exit(9)
    return commit(engine, totals, norm)
Engine.commit = dying
sys.argv = ["trainapp", *sys.argv[1:]]
__main__.main()
"""


@pytest.mark.slow
def test_a_run_that_is_killed_between_two_updates_resumes_exactly(tmp_path):
    """Through the command line: the discriminator of step 4 is updated, the generator not; it resumes from step 2."""
    overrides = [*runs.TINY, *OWN, "train.max_steps=6", "every.save=2"]
    env = {"PYTHONPATH": f"{TESTS}:{TESTS}/helpers:{TESTS.parent / 'src'}"}
    script = [sys.executable, "-c", KILLED.format(tests=str(TESTS))]
    killed = run_cli(*overrides, f"hydra.run.dir={tmp_path / 'b'}", cwd=tmp_path, env=env, command=script)
    assert killed.returncode == 9, killed.stderr
    assert [line["step"] for line in metrics(tmp_path / "b")] == [1, 2, 3]
    runs.run(tmp_path / "b", *OWN, "train.max_steps=6", "every.save=2")
    runs.run(tmp_path / "a", *OWN, "train.max_steps=6", "every.save=2")
    assert runs.differences(end(tmp_path / "b", 6), end(tmp_path / "a", 6)) == []


ABOVE_4 = Fault("forward", 1, above=4, update="generator")


@pytest.mark.slow
def test_each_update_has_sizes_of_its_own(tmp_path):
    """The generator runs out of memory above 4 samples: the other keeps 16. The result is the replay's, bit for bit."""
    settings = ("model.dropout=0.2", "train.max_steps=3", "oom.grow=false")
    recorded = Recorded(runs.configure(tmp_path / "a", *OWN, *settings, "batch.micro_size=auto"), ABOVE_4)
    assert [failure.recovery.old_size for failure in recorded.failures] == [16, 8]
    assert result(tmp_path / "a")["micro_schedule"] == {"discriminator": {"1": 16}, "generator": {"1": 4}}
    schedule = "batch.micro_schedule={discriminator: {1: 16}, generator: {1: 4}}"
    runs.run(tmp_path / "b", *OWN, *settings, "batch.micro_size=auto", schedule)
    assert runs.differences(runs.saved(tmp_path / "a", 3)["model"], runs.saved(tmp_path / "b", 3)["model"]) == []
    runs.run(tmp_path / "c", *OWN, *settings)  # other sizes, other statistics of the BatchNorm
    assert runs.differences(runs.saved(tmp_path / "a", 3)["model"], runs.saved(tmp_path / "c", 3)["model"]) != []
    assert recorded.result.oom_restarts == 2
    run = runs.closed(tmp_path / "a", *OWN, *settings, "batch.micro_size=auto", "train.max_steps=4")
    assert {name: own.size for name, own in run.sizes.by_update.items()} == {"discriminator": 16, "generator": 4}


@pytest.mark.slow
def test_a_torn_update_goes_back_to_the_checkpoint(tmp_path):
    """Memory runs out while the generator's parameters change: the run is rebuilt, and repeats whole steps."""
    settings = (*OWN, "train.max_steps=4", "every.save=2", "oom.grow=false")
    ended = Recorded(runs.configure(tmp_path / "a", *settings), Fault("commit", 4, 1, update="generator")).result
    assert (ended.steps, ended.oom_restarts) == (4, 1)
    assert ended.micro_schedule == {"discriminator": {1: 16}, "generator": {1: 16, 3: 8}}
    schedule = "batch.micro_schedule={discriminator: {1: 16}, generator: {1: 16, 3: 8}}"
    runs.run(tmp_path / "b", *settings, schedule)
    assert runs.differences(end(tmp_path / "a", 4), end(tmp_path / "b", 4)) == []


@ALL
def test_the_plan_is_that_of_the_highest_update(tmp_path, monkeypatch, own):
    settings = (*own, "batch.global_size=512", "data.size=600", "batch.micro_size=512", "every.eval=null")
    planned = runs.traced_peak(runs.configure(tmp_path, *settings), 512)
    run = runs.prepare(tmp_path, *settings)
    after, peaks = loop.after_update, []
    noting = lambda run, *rest: (peaks.append(run.memory.counter.peak), after(run, *rest))  # noqa: E731
    monkeypatch.setattr(loop, "after_update", noting)
    while len(peaks) < run.state.first_steps + 1:  # until the generator has had its update
        loop.train_step(run)
    run.close()
    assert len(set(peaks)) > 1
    assert planned == max(peaks)


def test_fp16_has_a_loss_scale_for_each(tmp_path):
    """The discriminator's gradients overflow at first, and the generator's do not: one scale falls."""
    big = "{name: discriminator, task: test_updates.enlarged, parameters: [discriminator], optimizer: {lr: 0.02}}"
    own = (*PARTS, f"updates=[{big}, {GENERATOR}]", "user_packages=[zoo,test_updates]", "precision=fp16")
    run = runs.prepare(tmp_path, *own, "precision.initial_scale=1024", "train.max_steps=2", "train.grad_clip=null")
    before = {name: runs.weights(part).clone() for name, part in run.state.model.named_children()}
    loop.train_step(run)
    changed = {name: not torch.equal(runs.weights(p), before[name]) for name, p in run.state.model.named_children()}
    scales = {update.name: update.precision.scaler.get_scale() for update in run.state.updates}
    run.close()
    assert changed == {"discriminator": False, "generator": True}
    assert scales == {"discriminator": 512.0, "generator": 1024.0}
    assert (run.state.progress.step, run.state.progress.skipped) == (1, 0)
    (line,) = metrics(tmp_path)
    assert "discriminator/loss" not in line
    assert line["loss"] == line["generator/loss"]
    assert line["discriminator/loss_scale"] == 512.0


def enlarged(model, batch):
    """The discriminator's loss, too large for fp16."""
    loss, count, sums = discriminate(model, batch)
    return loss.float() * 1e4, count, sums


def test_a_step_that_is_not_finite_in_one_update_is_skipped_there_alone(tmp_path):
    spoiled = "{name: discriminator, task: test_updates.spoiled, parameters: [discriminator], optimizer: {lr: 0.02}}"
    own = (*PARTS, f"updates=[{spoiled}, {GENERATOR}]", "user_packages=[zoo,test_updates]", "train.max_steps=2")
    with pytest.raises(Exception, match=r"step 1 \(discriminator\): the loss is not finite"):
        runs.run(tmp_path / "stop", *own)
    ended = runs.run(tmp_path / "skip", *own, "train.nonfinite=skip")
    assert ended.steps == 2
    assert all("discriminator/loss" not in line and "generator/loss" in line for line in metrics(tmp_path / "skip"))


def spoiled(model, batch):
    """Nothing but nan."""
    loss, count, sums = discriminate(model, batch)
    return loss * float("nan"), count, sums


def updates(*entries):
    return (*PARTS, f"updates=[{', '.join(entries)}]")


def generating(text, other):
    """With another setting of the generator's update."""
    assert text in GENERATOR
    return (*updates(DISCRIMINATOR, GENERATOR.replace(text, other)), "user_packages=[zoo,own_tasks,test_updates]")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [  # settings that exclude each other: config/test_excludes.py
        (generating("zoo.gans.generate", "own_tasks.Whole"), r"updates\.1\.task=.*\.Whole has whole_batch=True"),
        (
            updates(DISCRIMINATOR),
            r"updates: no update trains generator\.0\.weight, .* add them to the parameters of one",
        ),
        (
            generating("parameters: [generator]", "parameters: ['*']"),
            r"updates\.1\.parameters: discriminator\.0\.weight is also matched by updates\.0\.parameters;",
        ),
        (
            generating("parameters: [generator]", "parameters: [generater]"),
            r"updates\.1\.parameters=\[generater\]: GAN has no parameter or module of this name; its top-level",
        ),
        (
            generating("name: generator", "name: generator, every: 3, offset: 4"),
            r"updates\.1\.offset=4: must be at most `every`, 3: it shifts the steps, and delays none; lower it",
        ),
        (generating("momentum", "momentun"), r"updates\.1\.optimizer\.momentun: .*; did you mean 'momentum'"),
        ((*OWN, "model.freeze=[generator]"), r"updates\.1\.parameters: nothing that it matches \("),
    ],
)
def test_mistakes_are_one_message(tmp_path, overrides, message):
    with pytest.raises(UserError, match=message):
        runs.run(tmp_path / "run", *overrides)
    assert not (tmp_path / "run").exists()


def test_a_run_continues_only_with_the_same_offset(tmp_path):
    runs.run(tmp_path, *SHIFTED, "train.max_steps=1")
    assert result(tmp_path)["micro_schedule"] == {"discriminator": {"1": 16}}  # the generator was not updated yet
    directory.require_same_experiment(runs.configure(tmp_path, *SHIFTED))
    for other, now in ((RARELY, "not set"), (generating("name: generator", "name: generator, every: 3, offset: 1"), 1)):
        with pytest.raises(UserError, match=rf"updates\.generator\.offset: 2 before, {now} now"):
            directory.require_same_experiment(runs.configure(tmp_path, *other))


def test_a_write_in_the_first_forward_of_a_late_update_is_seen(tmp_path):
    """Not only one in the run's first two steps."""
    late = GENERATOR.replace("zoo.gans.generate", "test_updates.writing").replace(
        "name", "every: 4, offset: 0, name", 1
    )
    run = runs.prepare(tmp_path, *updates(DISCRIMINATOR, late), "user_packages=[zoo,test_updates]", "train.max_steps=4")
    loop.train(run)
    run.close()
    assert run.snapshot.written == ["model.discriminator.0.weight"]


def writing(model, batch):
    """Writes a parameter where its version counter does not show it."""
    if model.training:
        model.discriminator[0].weight.data.mul_(0.5)
    return generate(model, batch)


def test_checkpoints_of_other_updates_are_refused(tmp_path):
    runs.run(tmp_path / "a", *OWN, "train.max_steps=1")
    one = (*PARTS, "task=zoo.gans.generate", "train.max_steps=2", f"checkpointing.resume={tmp_path / 'a'}")
    with pytest.raises(UserError, match="it was saved with the updates discriminator, generator, but this run has one"):
        runs.run(tmp_path / "b", *one)


@pytest.mark.parametrize("task", ["mean", "detached"])
def test_a_mistake_in_the_loss_of_one_names_it(tmp_path, task):
    """Seen before the first step, or while training."""
    rules = {"mean": "the loss is a mean", "detached": "its loss requires no gradient"}
    one, other = (
        f"{{name: {name}, task: own_tasks.{task}, parameters: [{name}], optimizer: {{lr: 0.01}}}}"
        for name, task in (("body", "total"), ("head", task))
    )
    own = (*runs.own_model("own_models.Normed"), "data=digits", "user_packages=[own_models,own_tasks]")
    with pytest.raises(UserError, match=rf"^updates\.1\.task=own_tasks\.{task}: {rules[task]}"):
        runs.run(tmp_path, *own, f"updates=[{one}, {other}]")


class Cutting:
    """A loss with a `split` of its own."""

    split = staticmethod(lambda batch, start, end: {name: values[start:end] for name, values in batch.items()})

    def __call__(self, model, batch):
        return generate(model, batch)


def test_updates_that_would_cut_batches_differently_are_refused(tmp_path):
    own = generating("zoo.gans.generate", "test_updates.Cutting")
    with pytest.raises(UserError, match=r"updates: their tasks split batches in different ways"):
        runs.run(tmp_path / "one", *own, "train.check_loss=false")
    both = [entry.replace("zoo.gans.discriminate", "test_updates.Cutting") for entry in own]
    assert runs.run(tmp_path / "both", *both, "train.max_steps=1", "train.check_loss=false").steps == 1
