"""The table: ranks, seeds, what fits into 80 columns, and what TensorBoard shows of it."""

import csv
import json
from pathlib import Path

import pytest

from trainapp.errors import UserError
from trainapp.launch.lock import locked
from trainapp.sweep import leaderboard, rows, terminal
from trainapp.sweep.journal import Journal
from trainapp.sweep.outcome import TrialState
from trainapp.sweep.space import Dimension, Space

FACTS = {
    "metric": "accuracy", "direction": "max", "objective": 0.5, "best_objective": 0.5, "best_step": 4, "steps": 8,
    "seconds": 3.0, "micro_size": 16, "accumulation": 1, "oom_restarts": 0, "peak_memory_bytes": 1024,
}  # fmt: skip
SPACE = Space(
    (),
    (
        Dimension("model.width", ("4", "8")),
        Dimension("+optimizer.very.long_name", ("a" * 30, "b" * 30)),
        Dimension("train.seed", ("0", "1")),
    ),
)


@pytest.fixture
def journal(tmp_path):
    """A sweep of three trials: two seeds, and one that has failed."""
    journal = Journal(tmp_path)
    journal.add(
        "sweep",
        asked=SPACE.to_dict() | {"sampler": "grid"},
        command=[],
        cwd="/",
        started="2026-01-01T00:00:00",
        digests={},
    )
    values = [("4", "a" * 30, "0"), ("4", "a" * 30, "1"), ("8", "b" * 30, "0")]
    for number, best in enumerate((0.25, 0.75, None)):
        folder = tmp_path / str(number)
        (folder / ".hydra").mkdir(parents=True)
        (folder / ".hydra/overrides.yaml").write_text("- user_packages=[mine]\n")
        journal.add("trial", number=number, values=values[number], attributes={})
        journal.add("start", number=number, threads=None, folder=str(folder))
        if best is None:
            journal.add("end", number=number, state=TrialState.FAILED, error="TypeError: no", facts={})
        else:
            facts = FACTS | {"best_objective": best}
            journal.add("end", number=number, state=TrialState.FINISHED, error="", facts=facts)
    return journal


@pytest.fixture
def printed(journal, tmp_path, capsys, monkeypatch):
    """The lines of that sweep's table, on a terminal of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    leaderboard.show(tmp_path)
    return capsys.readouterr().out.splitlines()


def test_the_table_fits_the_terminal(printed):
    assert max(map(len, printed[:12])) <= 80


def test_the_best_is_first_and_what_has_failed_has_no_rank(printed):
    ranks = [line.split()[:3] for line in printed if line[:2] in ("1 ", "2 ", "- ")]
    assert ranks[:3] == [["1", "1", "0.75"], ["2", "0", "0.25"], ["-", "2", "-"]]


def test_seeds_are_averaged(printed):
    assert any("0,1  0.5 ± 0.35" in line for line in printed)


def test_below_the_table_are_errors_and_what_has_not_begun(printed):
    assert "2: TypeError: no" in printed
    assert any("5 jobs have not begun: model.width=4 optimizer" in line for line in printed)


def test_the_files_have_every_trial_that_has_begun(printed, tmp_path):
    with open(tmp_path / "leaderboard.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    assert [line["optimizer.very.long_name"] for line in lines] == ["a" * 30, "a" * 30, "b" * 30]
    assert [line["rank"] for line in lines] == ["1", "2", ""]
    assert [line["state"] for line in lines] == ["finished", "finished", "failed"]
    assert (tmp_path / "leaderboard.md").read_text().count("\n") == 5


def test_different_objectives_are_not_compared(journal, tmp_path, capsys):
    journal.add("end", number=1, state="finished", error="", facts=FACTS | {"metric": "loss"})
    leaderboard.show(tmp_path)
    assert "best: job" not in capsys.readouterr().out


def test_a_run_that_is_not_done_shows_what_it_has_logged(journal, tmp_path, capsys):
    journal.add("start", number=2, threads=None, folder=str(tmp_path / "2"))
    (tmp_path / "2/metrics.jsonl").write_text('{"step": 3}\n{"step": 5')
    (tmp_path / "2/evaluations.jsonl").write_text('{"step": 3, "accuracy": 0.9}\n')
    assert rows.read_sweep(journal)[2].state == "interrupted"
    with locked(str(tmp_path)):  # by its sweep: the job is starting, or ending
        assert rows.read_sweep(journal)[2].state == "running"
    with locked(str(tmp_path / "2")):
        live_rows = rows.read_sweep(journal)
    row = live_rows[2]
    assert (row.state, row.facts["steps"], row.best) == ("running", 3, 0.9)
    assert terminal.best_text(live_rows) == "accuracy 0.9 (job 2)"


def row_of(seed, width, state=TrialState.FINISHED):
    """A row with this seed and this setting."""
    facts = FACTS if state is TrialState.FINISHED else {}
    return rows.Row("", Path("sweep"), {"train.seed": seed, "width": width}, state, facts)


def test_repetitions_are_not_seeds():
    merged = rows.merge_seeds([row_of("0", "4"), row_of("0", "4"), row_of("0", "8"), row_of("1", "8")])
    assert [row.spread for row in merged] == [None, None, 0.0]
    assert rows.merge_seeds([row_of("0", "4"), row_of("0", "4")]) == []


def test_a_mean_waits_for_seeds_that_have_not_begun():
    (row,) = rows.merge_seeds([row_of("0", "4"), row_of("1", "4"), row_of("2", "4", rows.NOT_BEGUN)])
    assert (row.state, row.is_whole) == ("finished, not begun", False)


def test_a_sweep_that_was_moved_has_its_own_jobs(journal, tmp_path):
    journal.add("start", number=0, threads=None, folder="0")
    (tmp_path / "sweep.jsonl").rename(tmp_path / "1/sweep.jsonl")
    assert Journal(tmp_path / "1", writes=False).trials[0].folder == str(tmp_path / "1/0")


def test_runs_of_different_files_are_not_averaged(tmp_path):
    for seed, width in ((0, 8), (1, 8), (2, 16)):
        folder = tmp_path / str(seed) / ".hydra"
        folder.mkdir(parents=True)
        (folder / "command.json").write_text("{}")
        (folder / "overrides.yaml").write_text(f"[model=mine, train.seed={seed}]")
        (folder / "config.yaml").write_text(f"{{model: {{width: {width}}}, train: {{seed: {seed}, max_steps: 5}}}}")
    merged = rows.merge_seeds(rows.read_folder(tmp_path))
    assert [row.name for row in merged] == ["0,1", "2"]


def test_a_folder_without_runs(tmp_path):
    with pytest.raises(UserError, match="no sweep and no runs are here"):
        leaderboard.show(tmp_path)


def test_the_last_line_of_a_killed_sweep_is_cut_off(journal, tmp_path):
    path = tmp_path / "sweep.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"event": "start", "num')
    assert Journal(tmp_path, writes=False).trials == journal.trials
    assert path.read_bytes() != whole  # who only reads leaves the file alone
    Journal(tmp_path).add("promote", number=0, rung=1)
    assert [json.loads(line)["event"] for line in path.read_text().splitlines()][-2:] == ["end", "promote"]
