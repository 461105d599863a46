"""`mode=predict` of a model with a row of state per sequence: no row may be written by two time steps at once."""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import runs

from trainapp.config.schema import Config
from trainapp.errors import UserError
from trainapp.inference.rows import RowFile
from trainapp.launch import worker
from trainapp.parallel.ranks import SingleRank
from trainapp.run import runner

from .cell import Cell
from .rank import Record, leave_group, logged_to
from .test_predict_on_ranks import QUIET
from .test_rows_of_samples import COLUMNS, EXACT, POSITIONS

pytestmark = pytest.mark.slow

PREDICTS = ("task={_target_: writing_models.Squares}", "user_packages=[writing_models]", "batch.global_size=6")


def predict(rank: int, config: Config, faults: Any, folder: str, single: bool) -> Record:
    """Predict; the arguments are those of `rank.train`. Return the messages, and that of a UserError."""
    record = Record()
    with logged_to(record):
        try:
            with contextlib.nullcontext(SingleRank()) if single else worker.process_group(config) as ranks:
                runner.run(config, ranks)
        except UserError as error:
            record.error = str(error)
            leave_group()
    return record


class Sequences:
    """The predictions of a model that was trained on one rank."""

    def __init__(self, cell: Cell, folder: Path, settings: tuple[str, ...]):
        self.cell = cell
        self.folder = folder
        self.trained = cell.directory()
        (record,) = cell.run(0, "parallel=single", "train.max_steps=2", tiny=settings, run_dir=self.trained)
        assert record.error is None

    def predict(self, world: int, columns: int, samples: int) -> tuple[list[float], Record]:
        """Return the predictions of a number of sequences, none if there is no file, and the record of rank 0.

        Args:
            world: the number of ranks; 0: one process.
            columns: the number of sequences.
            samples: per batch.
        """
        path = self.folder / f"{world}_{columns}_{samples}.jsonl"
        settings = [f"checkpointing.resume={self.trained}", f"predict.output={path}", f"predict.batch_size={samples}"]
        settings.append("parallel=ddp" if world else "parallel=single")
        settings.append(f"+data.val_columns={columns}")
        (record, *_) = self.cell.run(world, *settings, *PREDICTS, tiny=QUIET, function=predict)
        assert not list(self.folder.glob("*.partial"))
        if not path.exists():
            return [], record
        return [json.loads(line)["prediction"] for line in path.read_text().splitlines()], record


@pytest.mark.parametrize(("columns", "samples"), [(3, 64), (3, 3), (3, 1), (5, 2), (1, 4)])
def test_sequences_that_the_ranks_do_not_divide_are_refused(cell, tmp_path, columns, samples):
    """Ranks take the samples in turn, and so the time steps of each sequence."""
    predictions, record = Sequences(cell, tmp_path, COLUMNS).predict(2, columns, samples)
    assert predictions == []
    assert "mode=predict: the ranks write the same rows of model.hidden (per_sample_buffers)" in record.error
    assert record.error.endswith("predict with parallel=single")


@pytest.mark.parametrize(("settings", "columns", "samples"), [(COLUMNS, 6, 64), (COLUMNS, 4, 1), (POSITIONS, 6, 3)])
def test_sequences_that_they_divide_are_those_of_one_process(cell, tmp_path, settings, columns, samples):
    """By the row of each sequence or of each place in the micro-batch."""
    sequences = Sequences(cell, tmp_path, settings)
    alone, _ = sequences.predict(0, columns, 1 if settings is COLUMNS else columns)
    predictions, record = sequences.predict(2, columns, samples)
    assert record.error is None
    assert len(predictions) == 8 * columns
    assert predictions == pytest.approx(alone, rel=EXACT)


def test_no_batch_has_two_time_steps_of_a_sequence(cell, tmp_path):
    """Of one process: `predict.batch_size` is larger than the number of sequences."""
    sequences = Sequences(cell, tmp_path, COLUMNS)
    alone, _ = sequences.predict(0, 3, 1)
    predictions, record = sequences.predict(0, 3, 64)
    assert predictions == pytest.approx(alone, rel=EXACT)
    (text,) = [text for text in record.log if "predict.batch_size=64" in text]
    assert "the first 24 samples write to 3 rows of model.hidden (per_sample_buffers)" in text
    assert "predicted 3 samples at a time" in text


def test_another_process_begins_again(tmp_path, monkeypatch):
    """The state of the sequences is in memory only."""
    runs.run(tmp_path / "run", *COLUMNS, "train.max_steps=2")
    write = RowFile.write
    numbers_of_rows = []

    def failing(file: RowFile, rows: Any) -> None:
        write(file, rows)
        numbers_of_rows.append(file.written)
        if numbers_of_rows == [3, 6]:
            raise UserError("injected")

    monkeypatch.setattr(RowFile, "write", failing)
    settings = (*PREDICTS, "+data.val_columns=3", "predict.batch_size=3")
    with pytest.raises(UserError, match="injected"):
        runs.infer("predict", tmp_path, tmp_path / "run", *settings)
    rows = runs.infer("predict", tmp_path, tmp_path / "run", *settings)
    assert numbers_of_rows == [3, 6, *range(3, 25, 3)]
    assert rows == runs.infer("predict", tmp_path, tmp_path / "run", *settings, output="at_once.jsonl")
