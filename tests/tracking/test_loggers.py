"""The loggers of the tracker: the same run after a resume, and none of them stops a run."""

import contextlib
import csv
import json
import logging
import sqlite3

import own_hooks
import pytest
import runs
from helpers import evaluations, metrics, run_cli, scalars

from trainapp.tracking.loggers import Start, TensorBoard

MLP = (*runs.MODELS["mlp"], "user_packages=[own_hooks]", "every.eval=2")


def rows(path):
    with path.open() as file:
        return list(csv.DictReader(file))


@pytest.fixture(autouse=True)
def nothing_seen():
    own_hooks.SEEN.clear()


def test_tensorboard_has_a_table_of_settings(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra/overrides.yaml").write_text("- optimizer.lr=1e-3\n- model=mlp\n- ++train.compile=true\n")
    logger = TensorBoard()
    logger.start(Start(tmp_path, 0, {}, continues=False))
    logger.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    found = HParamsPluginData.FromString(events.PluginTagToContent("hparams")["_hparams_/session_start_info"])
    own = found.session_start_info.hparams
    assert own["model"].string_value == "mlp"
    assert own["optimizer.lr"].number_value == 1e-3
    assert own["train.compile"].string_value == "true"


def test_csv_beside_tensorboard(tmp_path):
    """Of a resumed run each step once, in the columns of all its parts."""
    chosen = (*MLP, "tracker=[tensorboard,csv]")
    runs.run_until(tmp_path, 2, *chosen)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "loss": 1.0}\n{"st')  # a step after the checkpoint, and a killed process's half line
    runs.run(tmp_path, *chosen, "train.peak_flops=1e9")
    assert "mfu" in metrics(tmp_path)[-1]
    lines, table = metrics(tmp_path), rows(tmp_path / "metrics.csv")
    assert [int(row["step"]) for row in table] == [1, 2, 3, 4]
    assert [float(row["loss"]) for row in table] == [line["loss"] for line in lines]
    assert [float(row["accuracy"]) for row in rows(tmp_path / "evaluations.csv")] == [
        line["accuracy"] for line in evaluations(tmp_path)
    ]
    assert set(scalars(tmp_path)["train/loss"]) == {1, 2, 3, 4}


@pytest.mark.parametrize(("method", "calls"), [("start", 0), ("scalars", 2), ("close", 0)])
def test_a_tracker_that_fails_goes_quiet(tmp_path, caplog, method, calls):
    bad = f"+tracker.bad={{_target_: own_hooks.Breaks, method: {method}, calls: {calls}}}"
    with caplog.at_level(logging.WARNING):
        ended = runs.run(tmp_path, *MLP, bad)
    assert ended.steps == 4
    assert set(scalars(tmp_path)["train/loss"]) == {1, 2, 3, 4}  # the other one continues
    said = [r.getMessage() for r in caplog.records if "tracker.bad" in r.getMessage()]
    assert said == [f"tracker.bad failed in {method} (ConnectionError: no route to host); the run continues without it"]
    assert own_hooks.SEEN.count("scalars") == {"start": 0, "close": 6}.get(method, calls + 1)


@pytest.mark.slow
def test_mlflow_continues_the_same_run(tmp_path):
    pytest.importorskip("mlflow", reason="needs the extra trainapp[mlflow]")
    chosen = (*MLP, "tracker=mlflow", f"tracker.mlflow.uri={(tmp_path / 'mlruns').as_uri()}")
    run_dir = tmp_path / "run"
    runs.run_until(run_dir, 2, *chosen)
    known = json.loads((run_dir / "trackers/mlflow.json").read_text())
    runs.run(run_dir, *chosen, "callbacks=confusion_matrix")
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=known["uri"])
    (experiment,) = client.search_experiments(filter_string="name = 'trainapp'")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_id == known["id"]
    assert run.info.status == "FINISHED"
    assert run.data.params["model.arguments.width"] == "16"
    history = client.get_metric_history(known["id"], "train/loss")
    assert {(m.step, m.value) for m in history} == {(line["step"], line["loss"]) for line in metrics(run_dir)}
    assert [m.value for m in client.get_metric_history(known["id"], "eval/accuracy")] == [
        line["accuracy"] for line in evaluations(run_dir)
    ]
    (image,) = client.list_artifacts(known["id"], "confusion_matrix/step_00000004")
    assert image.path.endswith(".png")


@pytest.mark.slow
def test_wandb_continues_the_same_run(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="needs the extra trainapp[wandb]")
    monkeypatch.setenv("WANDB_SILENT", "true")
    log, logged = wandb.Run.log, []
    monkeypatch.setattr(wandb.Run, "log", lambda run, values: logged.append((run.id, values)) or log(run, values))
    chosen = (*MLP, "tracker=wandb", "tracker.wandb.mode=offline")
    runs.run_until(tmp_path, 2, *chosen)
    run_id = json.loads((tmp_path / "trackers/wandb.json").read_text())["id"]
    runs.run(tmp_path, *chosen, "callbacks=[predictions,confusion_matrix]")
    folders = sorted((tmp_path / "wandb").glob("offline-run-*"))
    assert len(folders) == 2
    assert all(f"-{run_id}" in folder.name for folder in folders)  # "-1" follows where both began in the same second
    assert any("confusion_matrix" in path.name for path in folders[1].rglob("*.png"))
    found = [(own, values["step"], values["train/loss"]) for own, values in logged if "train/loss" in values]
    assert found == [(run_id, line["step"], line["loss"]) for line in metrics(tmp_path)]


@pytest.mark.slow
def test_trackio_continues_the_same_run(tmp_path, monkeypatch):
    """In processes of their own: Trackio reads TRACKIO_DIR when it is imported."""
    pytest.importorskip("trackio", reason="needs the extra trainapp[trackio]")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    run_dir, chosen = tmp_path / "run", (*MLP, "train.device=cpu", "every.log=1", "tracker=trackio")
    for steps in (2, 4):
        more = ("callbacks=confusion_matrix", f"train.max_steps={steps}", f"hydra.run.dir={run_dir}")
        done = run_cli(*chosen, *more, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert "Trackio" not in done.stdout  # what it prints is on stderr
    run = json.loads((run_dir / "trackers/trackio.json").read_text())["run"]
    with contextlib.closing(sqlite3.connect(tmp_path / "trackio/trainapp.db")) as database:
        table = list(database.execute("SELECT run_name, step, metrics FROM metrics ORDER BY id"))
    assert {name for name, _, _ in table} == {run}
    logged = [(step, json.loads(values)) for _, step, values in table]
    losses = [(step, values["train/loss"]) for step, values in logged if "train/loss" in values]
    assert losses == [(line["step"], line["loss"]) for line in metrics(run_dir)]
    assert [values["eval/accuracy"] for _, values in logged if "eval/accuracy" in values] == [
        line["accuracy"] for line in evaluations(run_dir)
    ]
    images = [values["confusion_matrix"]["file_path"] for _, values in logged if "confusion_matrix" in values]
    assert [(tmp_path / "trackio/media" / path).is_file() for path in images] == [True, True]
