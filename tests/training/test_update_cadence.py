"""An update with `every`: made in the first step and in every Nth."""

import copy

import pytest
import runs
import torch
from helpers import metrics
from test_updates import DISCRIMINATOR, GENERATOR, SecondOf, end, failing_run, updates
from zoo.gans import discriminate, generate

from trainapp import plan
from trainapp.data.progress import due_updates
from trainapp.data.sampler import epoch_order
from trainapp.errors import UserError
from trainapp.rng import seed_from
from trainapp.training import loop

RARELY = GENERATOR.replace("name: generator", "name: generator, every: 3")
OWN = updates(DISCRIMINATOR, RARELY)


def test_which_are_due():
    steps = [due_updates(step, (1, 3, 2)) for step in range(7)]
    assert steps == [[0, 1, 2], [0, 2], [0, 1], [0, 2], [0], [0, 1, 2], [0]]


def test_it_is_the_loop_that_a_user_would_write(tmp_path):
    run = runs.prepare(tmp_path, *OWN, "optimizer.weight_decay=0", "train.max_steps=7")
    model, data = copy.deepcopy(run.state.model), run.batches.dataset
    loop.train(run)
    run.close()
    parts = {"discriminator": model.discriminator, "generator": model.generator}
    optimizers = {
        "discriminator": torch.optim.AdamW(model.discriminator.parameters(), lr=0.02, weight_decay=0.0),
        "generator": torch.optim.SGD(model.generator.parameters(), lr=0.05, momentum=0.9),
    }
    samples = [epoch_order(0, epoch, len(data))[start : start + 16] for epoch in range(3) for start in (0, 16, 32)]
    made = []
    for step, indices in enumerate(samples[:7], start=1):
        for number, (name, task) in enumerate((("discriminator", discriminate), ("generator", generate))):
            if name == "generator" and step not in (1, 3, 6):
                continue
            made.append((step, name))
            seed_from(torch.device("cpu"), 0, step, number, 0)
            model.zero_grad()
            loss, count, _ = task(model, {"inputs": data.inputs[indices]})
            (loss / count).backward()
            torch.nn.utils.clip_grad_norm_(parts[name].parameters(), 1.0)
            optimizers[name].step()
    torch.testing.assert_close(runs.weights(run.state.model), runs.weights(model), rtol=1e-4, atol=1e-6)
    logged = [(line["step"], name) for line in metrics(tmp_path) for name in parts if f"{name}/loss" in line]
    assert logged == made


@pytest.mark.parametrize("stop", [1, 3, 4])
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, stop):
    settings = (*OWN, "train.max_steps=7", "every.eval=2", "train.ema=0.9")
    runs.run(tmp_path / "a", *settings)
    runs.run_until(tmp_path / "b", stop, *settings)
    runs.run(tmp_path / "b", *settings)
    assert runs.differences(end(tmp_path / "b", 7), end(tmp_path / "a", 7)) == []
    runs.run(tmp_path / "c", *updates(DISCRIMINATOR, GENERATOR), *settings[len(OWN) :])
    assert runs.differences(end(tmp_path / "c", 7)["model"], end(tmp_path / "a", 7)["model"]) != []


def test_an_error_in_it_is_retried_bit_for_bit(tmp_path):
    settings = (*OWN, "train.max_steps=6", "oom.grow=false", "batch.micro_size=8")
    failing_run(tmp_path / "a", SecondOf("generator"), *settings)
    schedule = "batch.micro_schedule={discriminator: {1: 8}, generator: {1: 4}}"
    runs.run(tmp_path / "b", *settings, schedule)
    assert runs.differences(end(tmp_path / "a", 6), end(tmp_path / "b", 6)) == []


def test_batches_are_fetched_ahead_all_the_same(tmp_path):
    run = runs.prepare(tmp_path / "a", *OWN, "train.max_steps=8")
    source, opened = run.batches._loader, []
    batches = source.batches

    def counting(requests):
        opened.append(requests)
        return batches(requests)

    source.batches = counting
    loop.train(run)
    run.close()
    assert len(opened) == 1
    runs.run(tmp_path / "b", *OWN, "train.max_steps=8", "data.num_workers=2")
    assert runs.differences(end(tmp_path / "b", 8)["model"], end(tmp_path / "a", 8)["model"]) == []


def test_a_plan_counts_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = [*runs.TINY, "plan.techniques=false"]
    often, rarely = (plan([*settings, *updates(DISCRIMINATOR, own)])["peak_bytes"] for own in (GENERATOR, RARELY))
    assert rarely == often


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ((RARELY, DISCRIMINATOR), r"updates: the first update is made in every step"),
        ((DISCRIMINATOR, RARELY.replace("every: 3", "every: 0")), r"updates\.1\.every=0: must be greater than 0"),
    ],
)
def test_mistakes(tmp_path, own, message):
    with pytest.raises(UserError, match=message):
        runs.configure(tmp_path, *updates(*own))
