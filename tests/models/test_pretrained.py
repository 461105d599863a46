"""Weights of a folder: complete, or a new layer for the task and a note, or one message."""

import logging
import shutil

import hf_files
import pytest
import runs
import torch
from safetensors.torch import load_file, save_file

from trainapp.errors import UserError

transformers = pytest.importorskip("transformers", reason="needs the extra trainapp[hf]")

from trainapp.models.huggingface import build  # noqa: E402

UP = "model.layers.1.mlp.up_proj.weight"
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def complete(tmp_path_factory):
    return hf_files.model_folder(tmp_path_factory.mktemp("complete") / "llama")


def without(complete, folder, *names):
    """A copy of the folder that lacks these weights."""
    shutil.copytree(complete, folder)
    weights = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if name not in names}
    assert len(weights) - len(kept) == len(names)
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_missing_weights_are_refused(tmp_path, complete):
    """By the real entry point, too: it would train, with weights that are drawn."""
    folder = without(complete, tmp_path / "part", UP, "lm_head.weight")
    message = rf"model\.path=.*part: it lacks weights of LlamaForCausalLM, .*: lm_head\.weight, {UP}; name a folder"
    with pytest.raises(UserError, match=message):
        build("causal_lm", path=str(folder))
    tokens = ("data=synthetic_tokens", "data.vocab_size=64", "data.context_length=16", "data.size=64")
    with pytest.raises(UserError, match=message):
        runs.run(tmp_path / "run", "model=hf", "model.task=causal_lm", f"model.path={folder}", *tokens)
    with pytest.raises(UserError, match=rf"it lacks weights of LlamaForSequenceClassification, .*: {UP}; name"):
        build("sequence_classification", path=str(folder), num_classes=3)


def test_a_new_layer_for_another_task_is_noted(tmp_path, complete, caplog):
    caplog.set_level(logging.WARNING)
    model = build("sequence_classification", path=str(complete), num_classes=3)
    assert "new for this task, drawn from train.seed and not pretrained: score.weight" in caplog.text
    weights = load_file(complete / "model.safetensors")
    assert torch.equal(model.model.layers[1].mlp.up_proj.weight, weights[UP])
    caplog.clear()
    build("causal_lm", path=str(complete))
    assert "not pretrained" not in caplog.text
    model.save_pretrained(tmp_path / "three")
    build("sequence_classification", path=str(tmp_path / "three"), num_classes=3)
    assert "not pretrained" not in caplog.text
    build("sequence_classification", path=str(tmp_path / "three"), num_classes=5)
    assert "not pretrained: score.weight" in caplog.text
    lost = without(tmp_path / "three", tmp_path / "lost", "score.weight")
    with pytest.raises(UserError, match=r"it lacks weights of LlamaForSequenceClassification, .*: score\.weight; name"):
        build("sequence_classification", path=str(lost), num_classes=3)


def test_a_pooler_counts_as_new(tmp_path, caplog):
    """A language model comes without; a body of another task with it."""
    bert = transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=64, **hf_files.SIZES))
    bert.save_pretrained(tmp_path)
    build("base", path=str(tmp_path))
    assert "not pretrained: pooler.dense.bias, pooler.dense.weight" in caplog.text
    build("sequence_classification", path=str(tmp_path), num_classes=2)
    assert "not pretrained: bert.pooler.dense.bias, bert.pooler.dense.weight, classifier.bias" in caplog.text


@pytest.mark.parametrize("damage", ["cut", "empty", "other"])
def test_damaged_files_get_one_message(tmp_path, complete, damage):
    folder = tmp_path / "damaged"
    shutil.copytree(complete, folder)
    file = folder / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes({"cut": content[: len(content) // 2], "empty": b"", "other": b"x" * 5000}[damage])
    with pytest.raises(UserError, match=rf"model\.path={folder}: ") as refused:
        build("causal_lm", path=str(folder))
    assert "\n" not in str(refused.value)
