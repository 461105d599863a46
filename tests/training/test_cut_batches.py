"""Batches of every make, fetched whole and then cut: the step is that of the whole batch."""

import odd_batches
import pytest
import runs
import torch
from odd_batches import KINDS, STEP, task

from trainapp.data.batch import map_tensors
from trainapp.data.loader import Fetcher

OVERRIDES = (
    *odd_batches.OVERRIDES,
    "train.grad_clip=null",
    "batch.micro_size=8",
    f"batch.global_size={STEP}",
)


# Rows are samples in these (but for tables with as many rows by chance, below).
CUT_BY_ROWS = {"padded", "table", "dataclass", "class weights", "packed sequence"}


def prepare(run_dir, kind, *overrides):
    """A run that fetches 8 samples at a time, and whose micro-batches hold 3 at most, whatever their shape."""
    run = runs.prepare(run_dir, *OVERRIDES, f"+data.kind={kind}", *overrides)
    run.sizes.train.follow({1 << power: 3 for power in range(12)} | {1 << 20: 8})  # the last is never seen
    calls, own_task = [], run.task

    def noting(model, batch):
        calls.append(len(odd_batches.texts_of(batch)[1]))
        return own_task(model, batch)

    run.task = noting
    return run, calls


def whole(run):
    """The mean loss and its gradient over the next step's samples, uncut."""
    data = run.batches.dataset
    batch = data.collate([data[index] for index in run.batches.indices(run.state.progress)])
    run.state.model.zero_grad()
    loss, count, _ = odd_batches.task(run.state.model, batch)
    (loss / count).backward()
    gradient = runs.gradients(run.state.model)
    run.state.model.zero_grad(set_to_none=True)
    return float(loss.detach() / count), gradient


@pytest.mark.parametrize(
    "single", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["whole batches", "lists of samples"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_of_cut_batches_is_that_of_the_whole_batch(tmp_path, kind, single):
    run, calls = prepare(tmp_path, kind, f"+data.single={single}")
    loss, expected = whole(run)
    totals = runs.accumulate(run)
    run.close()
    assert calls == [3, 3, 2] * 2
    assert totals.count == STEP
    assert totals.means()["loss"] == pytest.approx(loss, rel=1e-5)
    assert runs.relative_error(runs.gradients(run.state.model), expected) < 1e-5


def by_rows(samples):
    """A wrong variant: every tensor with as many rows as there are samples is cut."""

    def split(batch, start, end):
        return map_tensors(lambda t: t[start:end] if t.ndim and t.shape[0] == samples else t, batch)

    return split


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - CUT_BY_ROWS))
def test_cutting_them_by_rows_would_be_noticed(tmp_path, kind):
    run, _ = prepare(tmp_path, kind)
    _, expected = whole(run)
    run.batches._loader._split = by_rows(8)
    try:
        runs.accumulate(run)
    except Exception:  # torch or the task refuses what is left
        return
    finally:
        run.close()
    assert runs.relative_error(runs.gradients(run.state.model), expected) > 0.01


@pytest.mark.parametrize("kind", ["table", "dataclass", "class weights"])
def test_a_table_with_a_row_per_sample_by_chance_is_not_samples(tmp_path, kind):
    """The batches of 16 that would be cut in two have a table of 16 rows."""
    found = []
    for split in (None, by_rows(STEP)):
        run, calls = prepare(tmp_path / str(split), kind, "batch.micro_size=16")
        run.sizes.train.follow({1 << 20: 16})
        _, expected = whole(run)
        run.batches._loader._split = split
        runs.accumulate(run)
        run.close()
        assert calls == [3, 3, 3, 3, 2, 2]
        found.append(runs.relative_error(runs.gradients(run.state.model), expected))
    assert found[0] < 1e-5
    assert found[1] > 0.01


def test_a_task_or_a_data_set_may_say_how(tmp_path, monkeypatch):
    fetched = []
    fetch = Fetcher.__getitem__
    monkeypatch.setattr(Fetcher, "__getitem__", lambda self, request: fetched.append(request) or fetch(self, request))
    ends = []
    for way in ("collate", "task", "data set"):
        cuts = []

        def split(batch, start, end, cuts=cuts):
            cuts.append((start, end))
            inputs, targets = batch
            return inputs[start:end], targets[start:end]

        with monkeypatch.context() as patched:
            if way == "task":
                patched.setattr(task, "split", split, raising=False)
            elif way == "data set":
                patched.setattr(odd_batches.Texts, "split", staticmethod(split), raising=False)
            run, calls = prepare(tmp_path / way, "padded")
        fetched.clear()
        cuts.clear()
        runs.accumulate(run)
        run.close()
        assert calls == [3, 3, 2] * 2
        assert len(fetched) == (2 + 6 if way == "collate" else 2)
        assert cuts == ([] if way == "collate" else [(0, 3), (3, 6), (6, 8)] * 2)
        ends.append(runs.gradients(run.state.model))
    assert torch.equal(ends[1], ends[2])
    assert runs.relative_error(ends[0], ends[1]) < 1e-6  # padded to the longest of fewer samples


def test_an_attribute_split_that_is_not_a_function_is_no_way_to_cut(tmp_path, monkeypatch):
    """Many data sets keep the name of their split."""
    monkeypatch.setattr(odd_batches.Texts, "split", "train", raising=False)
    run, calls = prepare(tmp_path, "packed")
    runs.accumulate(run)
    run.close()
    assert calls == [3, 3, 2] * 2
