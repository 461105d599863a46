"""`model=hf`, and models of Transformers by their class: how the program reads them, and what it refuses."""

import contextlib
import logging
import shutil

import hf_files
import pytest
import runs
import torch
from helpers import metrics
from safetensors.torch import load_file, save_file
from torch import nn

from trainapp.config import targets
from trainapp.errors import UserError
from trainapp.models.inspect import blocks_of, last_layer, restore_cache, without_cache

transformers = pytest.importorskip("transformers", reason="needs the extra trainapp[hf]")

from trainapp.models.huggingface import build, require_documents_apart  # noqa: E402

CONFIG = {"model_type": "llama", **hf_files.SIZES, "vocab_size": 64}
TOKENS = ("data=synthetic_tokens", "data.vocab_size=64", "data.context_length=16", "data.size=64", "data.val_size=16")
pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_model_is_transformers_own_drawn_from_the_seed():
    torch.manual_seed(3)
    model = build("causal_lm", CONFIG)
    torch.manual_seed(3)
    own = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**CONFIG))
    assert type(model) is transformers.LlamaForCausalLM
    assert runs.differences(dict(model.state_dict()), dict(own.state_dict())) == []
    without_cache(model)
    assert model.config.use_cache is False
    restore_cache(model)
    assert model.config.use_cache is own.config.use_cache is True


def test_blocks_are_found_by_themselves():
    model = build("causal_lm", CONFIG)
    assert blocks_of(model, "parallel=fsdp") == list(model.model.layers)
    assert last_layer(model)[1].out_features == 64
    bert = build("sequence_classification", {**CONFIG, "model_type": "bert"}, num_classes=3)
    assert blocks_of(bert, "parallel=fsdp") == list(bert.bert.encoder.layer)
    assert bert.classifier.out_features == 3


def test_the_data_fills_in_what_the_configuration_leaves_open():
    bert = {"model_type": "bert", **hf_files.SIZES}
    model = build("sequence_classification", bert, vocab_size=99, num_classes=2, classes=["no", "yes"], pad_token_id=7)
    assert model.config.vocab_size == 99
    assert model.config.id2label == {0: "no", 1: "yes"}
    vit = {"model_type": "vit", **hf_files.SIZES, "patch_size": 4}
    images = build("image_classification", vit, image_shape=(1, 8, 8), num_classes=10)
    assert images(torch.zeros(2, 1, 8, 8)).logits.shape == (2, 10)
    long = build("causal_lm", CONFIG, context_length=5000)
    assert long.config.max_position_embeddings == 5000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"task": "causal_ml"}, r"model\.task=causal_ml: must be one of causal_lm.*did you mean 'causal_lm'"),
        ({"task": "causal_lm"}, r"model\.config=None: needs a model_type"),
        (
            {"task": "causal_lm", "config": {"model_type": "lama"}},
            "Unrecognized model identifier: lama",
        ),
        ({"task": "causal_lm", "config": CONFIG, "vocab_size": 65}, r"vocab_size=64: the data has 65 tokens"),
        ({"task": "causal_lm", "path": "./no/such"}, r"model\.path=\./no/such: there is no such folder"),
        (
            {"task": "causal_lm", "config": {**CONFIG, "trust_remote_code": True}},
            r"model\.config\.trust_remote_code: code shipped with a model and kernels on the hub are not run",
        ),
        (
            {"task": "causal_lm", "config": {**CONFIG, "max_position_embeddings": 8}, "context_length": 9},
            r"data\.context_length=9: the model has positions for 8 tokens",
        ),
        (
            {"task": "sequence_classification", "config": {**CONFIG, "num_labels": 3}, "num_classes": 2},
            r"num_labels=3: the data has 2 classes",
        ),
    ],
)
def test_a_mistake_gets_one_message(arguments, message):
    with pytest.raises(UserError, match=message):
        build(**arguments)


def test_a_folder_is_opened_and_its_settings_may_be_changed(tmp_path):
    folder = hf_files.model_folder(tmp_path / "llama", seed=5)
    model = build("causal_lm", {"attention_dropout": 0.25}, path=str(folder))
    own = transformers.LlamaForCausalLM.from_pretrained(folder)
    assert runs.differences(dict(model.state_dict()), dict(own.state_dict())) == []
    assert model.config.attention_dropout == 0.25
    with pytest.raises(UserError, match=r"vocab_size=300: the data has 301 tokens"):
        build("causal_lm", path=str(folder), vocab_size=301)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_documents_are_computed_as_by_themselves(attention):
    torch.manual_seed(0)
    model = build("causal_lm", CONFIG, attention=attention).eval()
    without_cache(model)
    documents = [torch.randint(64, (1, size)) for size in (5, 1, 7, 3)]
    positions = torch.cat([torch.arange(d.shape[1]) for d in documents])[None]
    with torch.no_grad():
        together = model(torch.cat(documents, 1), position_ids=positions).logits
        alone = torch.cat([model(document).logits for document in documents], 1)
        crossing = model(torch.cat(documents, 1)).logits
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)
    assert (crossing - alone).abs().max() > 1e-2  # the negative control: without positions


def test_weights_of_other_shapes_are_refused(tmp_path):
    """Those of a body: a classifier's last layer may be new."""
    folder = str(hf_files.model_folder(tmp_path / "folder"))
    build("sequence_classification", path=folder, num_classes=3)
    for task, classes in (("sequence_classification", 3), ("causal_lm", None)):
        with pytest.raises(UserError, match=r"changes the shapes of model\.layers\.0\.mlp"):
            build(task, {"intermediate_size": 64}, folder, num_classes=classes)


@pytest.mark.slow
def test_another_tokenizer_is_refused(tmp_path):
    """One that is trained on the data is another one for other data, though it may have as many tokens."""
    first, second = hf_files.texts(tmp_path / "first.jsonl"), tmp_path / "second.jsonl"
    second.write_text(first.read_text().replace("lazy", "very").replace("quick", "small"))
    chosen = (*hf_files.CAUSAL, "data=hf", "data.vocab_size=270", "data.context_length=16", *runs.TINY)
    chosen += ("train.max_steps=1",)
    runs.run(tmp_path / "run", *chosen, f"data.path={first}")
    with pytest.raises(UserError, match=r"^eval\.other\..*its tokenizer differs from that of the training data"):
        runs.prepare(
            tmp_path / "b", *chosen, f"data.path={first}", "+data@eval.other=hf", f"eval.other.path={second}",
            "eval.other.vocab_size=270", "eval.other.context_length=16",
        )  # fmt: skip
    resumed = ("mode=eval", f"checkpointing.resume={tmp_path / 'run'}", *chosen)
    runs.run(tmp_path / "same", *resumed, f"data.path={first}")
    with pytest.raises(UserError, match=r"the data's tokenizer has changed .* data\.tokenizer=FOLDER"):
        runs.run(tmp_path / "other", *resumed, f"data.path={second}")


def test_models_that_would_mix_packed_documents_are_refused():
    model = build("causal_lm", CONFIG)
    require_documents_apart(model)
    model.config._attn_implementation = "flash_attention_2"  # which is not installed: what a user has chosen
    with pytest.raises(UserError, match="flash_attention_2: it separates documents only in micro-batches of one"):
        require_documents_apart(model)
    with pytest.raises(UserError, match="MambaForCausalLM takes no position_ids"):
        require_documents_apart(build("causal_lm", {"model_type": "mamba", "hidden_size": 16, "num_hidden_layers": 1}))


def gradients(tmp_path, *overrides):
    overrides = (*hf_files.CAUSAL, *TOKENS, *runs.STEPS_ONLY, *overrides)
    with contextlib.closing(runs.prepare(tmp_path, *overrides)) as run:
        runs.accumulate(run)
        return runs.gradients(run.state.model)


@pytest.mark.parametrize(
    "technique",
    [
        ("activation_checkpointing=full",),
        ("activation_checkpointing=selective",),
        ("memory.loss_chunk=7",),
    ],
    ids=lambda technique: technique[0],
)
def test_techniques_leave_the_gradients_as_they_are(tmp_path, technique):
    plain, with_technique = gradients(tmp_path / "a"), gradients(tmp_path / "b", *technique)
    assert runs.relative_error(with_technique, plain) < 1e-6
    assert runs.relative_error(gradients(tmp_path / "c", "train.seed=1"), plain) > 0.1


def test_any_class_by_its_name(tmp_path):
    sizes = ", ".join(f"{name}: {value}" for name, value in {**hf_files.SIZES, "vocab_size": 64}.items())
    by_name = (
        "model=mlp",
        "~model.width",
        "~model.depth",
        "~model.dropout",
        "model._target_=transformers.LlamaForCausalLM",
        f"+model.config={{_target_: transformers.LlamaConfig, {sizes}}}",
    )
    runs.run(tmp_path / "class", *by_name, *TOKENS, "activation_checkpointing=full")
    runs.run(tmp_path / "hf", *hf_files.CAUSAL, *TOKENS)
    losses = [[line["loss"] for line in metrics(tmp_path / name)] for name in ("class", "hf")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    with pytest.raises(UserError, match=r"model\.config: transformers\.LlamaConfig|model\.config.*hidden"):
        runs.prepare(
            tmp_path / "typo",
            *by_name[:-1],
            "+model.config={_target_: transformers.LlamaConfig, hidden_size: x}",
            *TOKENS,
        )


@pytest.mark.parametrize("name", ["pipeline", "AutoModelForCausalLM", "Trainer"])
def test_other_names_of_transformers_are_refused(name):
    with pytest.raises(UserError, match=rf"model\._target_=transformers\.{name}: of Transformers, classes of models"):
        targets.locate(f"transformers.{name}", "model._target_", [])
    assert targets.locate("transformers.LlamaConfig", "model._target_", []) is transformers.LlamaConfig


def test_batches_with_a_mask_need_a_model_that_takes_it():
    from trainapp.losses.losses import beside_inputs, classification

    class Plain(nn.Module):
        def forward(self, inputs):
            return inputs.float()

    batch = {"inputs": torch.ones(2, 3), "targets": torch.zeros(2, dtype=torch.int64)}
    assert classification(Plain(), batch)[1] == 2
    with pytest.raises(UserError, match="the batches have attention_mask, which the forward of Plain does not take"):
        beside_inputs(Plain(), {**batch, "attention_mask": torch.ones(2, 3)})


def test_transformers_is_missing(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(UserError, match=r"model=hf: needs transformers, .*pip install 'trainapp\[hf\]'"):
        build("causal_lm", CONFIG)


def test_a_model_without_logits_gets_one_message(tmp_path):
    config = hf_files.LLAMA.partition("=")[2]
    with pytest.raises(UserError, match=r"LlamaModel returns no logits \(only last_hidden_state\).* than base"):
        runs.run(tmp_path, "model=hf", "model.task=base", f"model.config={config}", *TOKENS)


# Weights of a folder: complete, or a new layer for the task and a note, or one message

UP = "model.layers.1.mlp.up_proj.weight"


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
    message = rf"model\.path=.*part: it lacks weights of LlamaForCausalLM, .*: lm_head\.weight, {UP}; name a complete"
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
    assert "new for this task, initialised from train.seed, not pretrained: score.weight" in caplog.text
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
