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
from trainapp.launch import worker
from trainapp.parallel.ranks import SingleRank
from trainapp.run import runner

from .cells import _leave_group
from .conftest import Cell

QUIET = ("train.device=cpu", "memory.guard=false", "tracker=[]", "mode=predict")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    runs.run(folder, *runs.MODELS["mlp"], "train.max_steps=3", "optimizer.lr=0.01")
    return folder


def predict(rank: int, config: Config, faults: Any, folder: str, single: bool, errors: Any = ()) -> list[int]:
    """Predicts. Returns the samples of each batch on this rank. errors: by rank, raised at its third batch or later."""
    rows, seen = Predictor.rows, []

    def noting(self: Predictor, model: Any, micro: Any) -> Any:
        seen.append(micro.samples)
        if errors and errors[rank] is not None and len(seen) == 3 + rank:
            raise errors[rank]
        return rows(self, model, micro)

    Predictor.rows = noting
    try:
        if single:
            runner.run(config, SingleRank())
        else:
            with worker.process_group(config) as ranks:
                runner.run(config, ranks)
    except UserError:
        _leave_group()
    finally:
        Predictor.rows = rows
    return seen


class Predicting:
    """One cell, one checkpoint, one file by name."""

    def __init__(self, cell: Cell, trained: Path, tmp_path: Path):
        self.cell, self.trained, self.folder = cell, trained, tmp_path

    def run(self, world: int, name: str, *overrides: str, errors: Any = ()) -> list[list[int]]:
        spread = ("parallel=ddp",) if world else ()
        own = (f"checkpointing.resume={self.trained}", f"predict.output={self.folder / name}", "predict.batch_size=32")
        function = functools.partial(predict, errors=errors)
        return self.cell.run(world, *own, *spread, *overrides, tiny=QUIET, function=function)

    def lines(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / name).read_text().splitlines()]


@pytest.fixture
def predicting(cell, trained, tmp_path):
    return Predicting(cell, trained, tmp_path)


def require_same(found: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    assert [line["index"] for line in found] == list(range(len(wanted)))
    assert [line["prediction"] for line in found] == [line["prediction"] for line in wanted]
    assert [line["probability"] for line in found] == pytest.approx([line["probability"] for line in wanted], rel=1e-4)


STREAM = ("user_packages=[own_streams]", "data._target_=own_streams.Plain", "+data.val_samples=41", "~data.augment")


@pytest.mark.slow
@pytest.mark.parametrize(("overrides", "samples", "world"), [((), 360, 2), (STREAM, 41, 3)])
def test_the_file_of_one_process(predicting, overrides, samples, world):
    """Of a stream, too, of which every rank takes each second or third sample."""
    predicting.run(0, "one", *overrides)
    seen = predicting.run(world, "several", *overrides)
    assert len(predicting.lines("one")) == sum(map(sum, seen)) == samples
    assert all(abs(sum(own) - samples / world) < 1 for own in seen)
    require_same(predicting.lines("several"), predicting.lines("one"))
    assert not list(predicting.folder.glob("several.*"))


@pytest.mark.slow
def test_a_rank_without_memory_halves_its_own_batches(predicting):
    predicting.run(0, "one")
    first, second = predicting.run(2, "two", errors=(None, torch.OutOfMemoryError("CUDA out of memory. (injected)")))
    assert first == [32] * 5 + [20]
    assert second[:4] == [32] * 4
    assert max(second[4:]) == 16
    require_same(predicting.lines("two"), predicting.lines("one"))


@pytest.mark.slow
def test_the_same_command_continues(predicting):
    """Nothing is predicted twice; the file appears when all lines are there."""
    predicting.run(0, "one")
    predicting.run(2, "two", errors=(UserError("injected"),) * 2)
    assert not (predicting.folder / "two").exists()
    seen = predicting.run(2, "two", "predict.batch_size=30")
    assert [sum(own) for own in seen] == [180 - 64, 180 - 96]
    require_same(predicting.lines("two"), predicting.lines("one"))
