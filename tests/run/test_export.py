"""`mode=export`: the weights of a checkpoint as plain safetensors files."""

import json
import os

import pytest
import runs
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import trainapp
from trainapp.errors import UserError

GPT = runs.MODELS["gpt"]


def export(tmp_path, *overrides):
    """The folder with the exported weights of the run in `tmp_path / "run"`."""
    runs.run(tmp_path / "out", *GPT, "mode=export", f"checkpointing.resume={tmp_path / 'run'}", *overrides)
    return tmp_path / "out" / "export"


def split(folder):
    """The file of weights as two files with an index."""
    tensors = list(load_file(folder / "model.safetensors").items())
    (folder / "model.safetensors").unlink()
    files = {
        "model-00001-of-00002.safetensors": dict(tensors[:3]),
        "model-00002-of-00002.safetensors": dict(tensors[3:]),
    }
    for name, own in files.items():
        save_file(own, folder / name)
    index = {"weight_map": {tensor: name for name, own in files.items() for tensor in own}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_one_file(tmp_path):
    """The GPT's output layer shares the embedding's weight, which is written once, as in a checkpoint."""
    runs.run(tmp_path / "run", *GPT)
    (tmp_path / "out/export").mkdir(parents=True)
    (tmp_path / "out/export/class_names.json").write_text('["names", "of an earlier export"]')
    folder = export(tmp_path)
    assert [path.name for path in folder.iterdir()] == ["model.safetensors"]
    assert runs.differences(load_file(folder / "model.safetensors"), runs.saved(tmp_path / "run", 4)["model"]) == []
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    other = tmp_path / "touched"
    other.touch()
    assert os.stat(folder / "model.safetensors").st_mode == os.stat(other).st_mode  # not readable by the owner only


@pytest.mark.parametrize("model", ["Renamed", "Transposed"])
def test_the_average_of_a_model_that_changes_its_state_dict(tmp_path, model):
    """Its names, or its tensors: they are not those of its parameters."""
    chosen = ("data=digits", f"model._target_=own_exports.{model}", "user_packages=[own_exports]")
    runs.run(tmp_path / "run", *chosen, "train.ema=0.5", "optimizer.lr=0.1")
    runs.run(tmp_path / "out", *chosen, "mode=export", f"checkpointing.resume={tmp_path / 'run'}", "train.ema=0.5")
    loaded = trainapp.load(tmp_path / "run", which="last", user_packages=["own_exports"])
    expected, found = loaded.state_dict(), load_file(tmp_path / "out/export/model.safetensors")
    assert found.keys() == expected.keys() == {"old_weight", "old_bias"}
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    trained = runs.saved(tmp_path / "run", 4)["model"]
    assert not torch.equal(next(t for t in trained.values() if t.ndim == 1), found["old_bias"])


@pytest.mark.parametrize("is_split", [False, True])
def test_a_folder_of_weights_is_read(tmp_path, is_split):
    """Whole or, as the hub has large models, in several files, whose index will do, too."""
    runs.run(tmp_path / "run", *GPT)
    folder = export(tmp_path)
    if is_split:
        split(folder)
    trained = runs.saved(tmp_path / "run", 4)["model"]
    for path in (folder, *folder.glob("*.index.json")):
        again = runs.closed(tmp_path / "again", *GPT, f"model.init_from={path}")
        named = again.state.model.named_parameters()
        assert all(torch.equal(parameter, trained[name]) for name, parameter in named)


def test_a_folder_with_other_weights_is_refused(tmp_path):
    """They would be mixed: a reader finds the old file, or the index of the old ones."""
    runs.run(tmp_path / "run", *GPT)
    chosen = (*GPT, "mode=export", f"checkpointing.resume={tmp_path / 'run'}", f"export.folder={tmp_path / 'x'}")
    runs.run(tmp_path / "a", *chosen)
    runs.run(tmp_path / "b", *chosen)  # the same file is replaced
    split(tmp_path / "x")
    with pytest.raises(UserError, match=r"^export\.folder=.*it holds other weights.*model\.safetensors\.index\.json"):
        runs.run(tmp_path / "c", *chosen)
