"""Batches of every make, fetched whole and then cut: the step is that of the whole batch."""

import odd_batches
import pytest
import runs
import torch
from odd_batches import KINDS, STEP, task

from trainapp.data.batch import map_tensors
from trainapp.data.loader import Fetcher
from trainapp.errors import TrainingStopped, UserError
from trainapp.train import loop

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
    data = run.batches._source.fetcher.dataset
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
    run.batches._source._split = by_rows(8)
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
        run.batches._source._split = split
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
        # First a trial, so that a wrong signature is known at the start.
        assert cuts == ([] if way == "collate" else [(0, 1), *[(0, 3), (3, 6), (6, 8)] * 2])
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


def with_split(monkeypatch, run_dir, split, *overrides, kind="padded"):
    """One step of a run whose task has this `split`; none is needed in it."""
    monkeypatch.setattr(task, "split", split, raising=False)
    run = runs.prepare(run_dir, *OVERRIDES, f"+data.kind={kind}", "checkpointing=off", *overrides)
    try:
        loop.train_step(run)
    finally:
        run.close()
    return run


@pytest.mark.parametrize(
    ("split", "message"),
    [
        (lambda batch, start: batch, r"must take \(batch, start, end\): too many positional arguments"),
        (lambda batch, start, end: None, r"must return the samples \[start, end\) of a batch, but returned None"),
    ],
)
def test_a_split_that_cannot_work_is_refused_in_the_first_step(tmp_path, monkeypatch, split, message):
    with pytest.raises(UserError, match=message):
        with_split(monkeypatch, tmp_path, split)


def test_split_is_tried_once(tmp_path, monkeypatch):
    cuts = []

    def split(batch, start, end):
        cuts.append((start, end))
        torch.rand(1)
        return tuple(part[start:end] for part in batch)

    run = with_split(monkeypatch, tmp_path, split)
    assert cuts == [(0, 1)]
    assert run.state.progress.step == 1


def right(batch, start, end):
    """With the padding of the whole batch."""
    return tuple(part[start:end] for part in batch)


def shifted(batch, start, end):
    """Wrong by one sample."""
    inputs, targets = batch
    return inputs.roll(1, 0)[start:end], targets[start:end]


def first(batch, start, end):
    """Always the first samples."""
    return tuple(part[: end - start] for part in batch)


def everything(batch, start, end):
    return batch


def test_check_exactness_accepts_other_padding(tmp_path, monkeypatch):
    run = with_split(monkeypatch, tmp_path / "a", right, "debug=exactness")
    monkeypatch.delattr(task, "split")
    plain = runs.prepare(tmp_path / "b", *OVERRIDES, "+data.kind=padded", "train.deterministic=true")
    loop.train_step(plain)
    plain.close()
    assert torch.equal(runs.weights(run.state.model), runs.weights(plain.state.model))


@pytest.mark.parametrize("split", [shifted, first, everything])
def test_check_exactness_refuses_other_samples(tmp_path, monkeypatch, split):
    with_split(monkeypatch, tmp_path / "a", split)  # without the check nothing is noticed
    with pytest.raises(TrainingStopped, match=r"`split` does not cut a batch of 8 samples: for its samples \[\d, \d\)"):
        with_split(monkeypatch, tmp_path / "b", split, "debug=exactness")


@pytest.mark.slow
def test_samples_that_depend_on_their_batch_may_be_split(tmp_path, monkeypatch):
    """They differ when they are collated again, but both halves add up to the whole."""
    collate = odd_batches.Texts.collate

    def of_the_batch(self, samples):
        inputs, targets = collate(self, samples)
        return inputs * len(samples), targets

    monkeypatch.setattr(odd_batches.Texts, "collate", of_the_batch)
    assert with_split(monkeypatch, tmp_path / "a", right, "debug=exactness").state.progress.step == 1
    with pytest.raises(TrainingStopped):
        with_split(monkeypatch, tmp_path / "b", first, "debug=exactness")
