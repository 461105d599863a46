"""`mode=predict` on several ranks writes the file of a single process."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import runs
import torch

from trainapp.config.schema import Config
from trainapp.errors import UserError
from trainapp.inference.predict import Predictor
from trainapp.inference.rows import RowFile
from trainapp.launch import worker
from trainapp.parallel.ranks import SingleRank
from trainapp.run import runner

from .cell import Cell
from .rank import leave_group

QUIET = ("train.device=cpu", "memory.guard=false", "tracker=[]", "mode=predict")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    runs.run(folder, *runs.MODELS["mlp"], "train.max_steps=3", "optimizer.lr=0.01")
    return folder


def predict(rank: int, config: Config, faults: Any, folder: str, single: bool, errors: Any = ()) -> list[int]:
    """Predict. Return the number of samples in each batch that this rank has written.

    The arguments are those of `rank.train`, and `errors`: by rank, raised once, at its third batch or later.
    """
    rows = Predictor.rows
    write = RowFile.write
    sizes: list[int] = []
    errors_left = [error for error in errors[rank : rank + 1] if error is not None]

    def failing(self: Predictor, model: Any, micro: Any) -> Any:
        if errors_left and len(sizes) == 2 + rank:
            raise errors_left.pop()
        return rows(self, model, micro)

    def noting(self: RowFile, rows_of_batch: Any) -> None:
        sizes.append(len(rows_of_batch))
        write(self, rows_of_batch)

    Predictor.rows = failing
    RowFile.write = noting
    try:
        if single:
            runner.run(config, SingleRank())
        else:
            with worker.process_group(config) as ranks:
                runner.run(config, ranks)
    except UserError:
        leave_group()
    finally:
        Predictor.rows = rows
        RowFile.write = write
    return sizes


class Predicting:
    """One cell, one checkpoint, one file by name."""

    def __init__(self, cell: Cell, trained: Path, tmp_path: Path):
        self.cell = cell
        self.trained = trained
        self.folder = tmp_path

    def run(self, world: int, name: str, *overrides: str, errors: Any = ()) -> list[list[int]]:
        settings = [f"checkpointing.resume={self.trained}", f"predict.output={self.folder / name}"]
        settings.append("predict.batch_size=32")
        if world:
            settings.append("parallel=ddp")
        function = functools.partial(predict, errors=errors)
        return self.cell.run(world, *settings, *overrides, tiny=QUIET, function=function)

    def lines(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / name).read_text().splitlines()]


@pytest.fixture
def predicting(cell, trained, tmp_path):
    return Predicting(cell, trained, tmp_path)


def assert_same_lines(lines: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert [line["index"] for line in lines] == list(range(len(expected)))
    assert [line["prediction"] for line in lines] == [line["prediction"] for line in expected]
    probabilities = [line["probability"] for line in lines]
    assert probabilities == pytest.approx([line["probability"] for line in expected], rel=1e-4)


STREAM = ("user_packages=[own_streams]", "data._target_=own_streams.Plain", "+data.val_samples=41", "~data.augment")


@pytest.mark.slow
@pytest.mark.parametrize(("overrides", "samples", "world"), [((), 360, 2), (STREAM, 41, 3)])
def test_the_file_of_one_process(predicting, overrides, samples, world):
    """Of a stream, too, of which every rank takes each second or third sample."""
    predicting.run(0, "one", *overrides)
    sizes_by_rank = predicting.run(world, "several", *overrides)
    samples_by_rank = [sum(sizes) for sizes in sizes_by_rank]
    assert len(predicting.lines("one")) == sum(samples_by_rank) == samples
    assert all(abs(number - samples / world) < 1 for number in samples_by_rank)
    assert_same_lines(predicting.lines("several"), predicting.lines("one"))
    assert not list(predicting.folder.glob("several.*"))


@pytest.mark.slow
def test_a_rank_without_memory_halves_its_own_batches(predicting):
    predicting.run(0, "one")
    first, second = predicting.run(2, "two", errors=(None, torch.OutOfMemoryError("CUDA out of memory. (injected)")))
    assert first == [32] * 5 + [20]
    assert second[:3] == [32] * 3
    assert max(second[3:]) == 16
    assert_same_lines(predicting.lines("two"), predicting.lines("one"))


@pytest.mark.slow
def test_the_same_command_continues(predicting):
    """Nothing is predicted twice; the file appears when all lines are there."""
    predicting.run(0, "one")
    predicting.run(2, "two", errors=(UserError("injected"),) * 2)
    assert not (predicting.folder / "two").exists()
    sizes_by_rank = predicting.run(2, "two", "predict.batch_size=30")
    assert [sum(sizes) for sizes in sizes_by_rank] == [180 - 64, 180 - 96]
    assert_same_lines(predicting.lines("two"), predicting.lines("one"))
