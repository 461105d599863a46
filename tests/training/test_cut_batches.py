"""Batches of every make, fetched whole and then cut: the step is that of the whole batch."""

import pytest
import runs
import torch
from zoo import batches, catalogue
from zoo.by_hand import collated
from zoo.harness import configure

from trainapp.data.batch import map_tensors
from trainapp.data.loader import Fetcher
from trainapp.parallel.ranks import SingleRank
from trainapp.run.prepare import SessionStart
from trainapp.run.prepare import prepare as prepare_session
from trainapp.signals import StopRequest

# What rows would cut wrongly, and what they would not.
ODD = ("packed", "square time first", "table", "strings", "graphs")
KINDS = ("tuple", "sample weights", *ODD)


def prepare(run_dir, name):
    """A run that fetches 8 samples at a time, and whose micro-batches hold 3 at most, whatever their shape."""
    run = prepare_session(SessionStart(configure(catalogue.ALL[name], run_dir)), StopRequest(), SingleRank())
    run.sizes.train.set_sizes({1 << power: 3 for power in range(12)} | {1 << 20: 8})  # the last is never seen
    calls, own_task = [], run.task

    def noting(model, batch):
        calls.append(len(batches.index_of(batch)))
        return own_task(model, batch)

    run.engine.evaluated_task = noting
    return run, calls, own_task


def mean_gradient(run):
    """The gradient of the next step's mean loss, as the run accumulates and divides it; and that loss."""
    totals = runs.accumulate(run)
    return runs.gradients(run.state.model) * 16 / float(totals.count), totals.means()["loss"]


def of_the_whole_batch(run, task):
    """The same by plain PyTorch, uncut."""
    batch = collated(run.batches.dataset, run.batches.share(run.state.progress).numbers)
    return runs.of_whole_batch(run, task, batch)


@pytest.mark.parametrize("name", KINDS)
def test_a_step_of_cut_batches_is_that_of_the_whole_batch(tmp_path, name):
    run, calls, task = prepare(tmp_path, name)
    loss, expected = of_the_whole_batch(run, task)
    gradient, mean = mean_gradient(run)
    run.close()
    assert calls == [3, 3, 2] * 2
    assert mean == pytest.approx(loss, rel=1e-5)
    assert runs.relative_error(gradient, expected) < 1e-5


def by_rows(batch, start, end):
    """A wrong variant: every tensor with as many rows as there are samples is cut."""
    return map_tensors(lambda t: t[start:end] if t.ndim and t.shape[0] == 8 else t, batch)


@pytest.mark.parametrize("name", ODD)
def test_cutting_them_by_rows_would_be_noticed(tmp_path, name):
    run, _, task = prepare(tmp_path, name)
    _, expected = of_the_whole_batch(run, task)
    run.batches._loader.split = by_rows
    try:
        gradient, _ = mean_gradient(run)
    except Exception:  # torch or the task refuses what is left
        return
    finally:
        run.close()
    assert runs.relative_error(gradient, expected) > 0.01


@pytest.mark.parametrize("way", ["task", "data set", "neither"])
def test_a_task_or_a_data_set_may_say_how(tmp_path, monkeypatch, way):
    """Then each batch is fetched once. Many data sets keep the name of their split in such an attribute."""
    fetched, cuts = [], []
    fetch = Fetcher.__getitem__
    monkeypatch.setattr(Fetcher, "__getitem__", lambda self, request: fetched.append(request) or fetch(self, request))

    def split(batch, start, end):
        cuts.append((start, end))
        return [values[start:end] for values in batch]

    if way == "task":
        monkeypatch.setattr(batches.of_sequence, "split", split, raising=False)
    else:
        value = staticmethod(split) if way == "data set" else "train"
        monkeypatch.setattr(batches.Tuples, "split", value, raising=False)
    run, calls, task = prepare(tmp_path, "tuple")
    _, expected = of_the_whole_batch(run, task)
    fetched.clear()
    cuts.clear()
    gradient, _ = mean_gradient(run)
    run.close()
    assert calls == [3, 3, 2] * 2
    assert len(fetched) == (2 + 6 if way == "neither" else 2)
    assert cuts == ([] if way == "neither" else [(0, 3), (3, 6), (6, 8)] * 2)
    assert torch.allclose(gradient, expected, rtol=1e-4, atol=1e-7)
