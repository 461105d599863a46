"""Inference with models of Transformers: their cache, LoRA, tokenizers and the names of classes."""

import json

import pytest
import runs
import torch

pytest.importorskip("transformers", reason="needs the extra trainapp[hf]")

import hf_files
from transformers import AutoConfig, AutoModelForCausalLM

from trainapp.config.schema import Generate
from trainapp.inference.decoding import continue_by_transformers

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 60}
KINDS = {
    "llama": SIZES | {"intermediate_size": 48},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 60},  # learned positions
    "mistral": SIZES | {"intermediate_size": 48, "num_key_value_heads": 1, "sliding_window": 4},
}


@pytest.mark.parametrize("kind", KINDS)
def test_padding_on_the_left_changes_no_text(kind):
    """Although `use_cache` is off in the configuration. Drawn texts depend on seed and batch alone."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, use_cache=False, **KINDS[kind])).eval()
    for parameter in model.parameters():
        parameter.data *= 4 if parameter.ndim > 1 else 1
    prompts = {0: [1, 2, 3], 1: [4], 2: [5, 6, 7, 8, 9, 10]}

    def texts(chosen, ends=frozenset(), **settings):
        chosen, settings = {number: prompts[number] for number in chosen}, Generate(max_new_tokens=10, **settings)
        return continue_by_transformers(model, chosen, settings, ends, torch.device("cpu"))

    whole = texts([0, 1, 2], temperature=0.0)
    assert whole == [texts([number], temperature=0.0)[0] for number in prompts]
    assert all(len(text) == 10 for text in whole)
    end = whole[0][4]
    assert texts([0, 1, 2], frozenset({end}), temperature=0.0)[0] == whole[0][: whole[0].index(end) + 1]
    assert texts([0, 1], temperature=5.0) == texts([0, 1], temperature=5.0) != texts([0, 1], temperature=5.0, seed=1)


@pytest.mark.slow
def test_a_llama_with_lora_answers(tmp_path):
    """With what its examples end with, and as Transformers itself continues the prompt."""
    pytest.importorskip("peft", reason="needs the extra trainapp[peft]")
    folder = hf_files.model_folder(tmp_path / "model")
    data = ("data=sft", f"data.files={hf_files.examples(tmp_path / 'chat.jsonl')}", f"data.cache_dir={tmp_path}")
    model = ("model=hf", "model.task=causal_lm", f"model.path={folder}", "adapter=lora")
    runs.run(tmp_path / "run", *model, *data, "optimizer.lr=0.01", "train.max_steps=20")
    prompts = ["the fox over 1:", "the fox jumps over 2:"]
    wanted = (f"generate.prompts={json.dumps(prompts)}", "generate.temperature=0", "generate.max_new_tokens=12")
    found = runs.infer("generate", tmp_path, tmp_path / "run", *wanted)
    prepared = runs.prepare(tmp_path / "plain", *model, *data, "mode=eval", f"checkpointing.resume={tmp_path / 'run'}")
    prepared.tracker.close()
    own, data = prepared.state.model.eval(), prepared.batches.dataset
    for line in found:
        tokens = torch.tensor([data.encode(line["prompt"])])
        expected = own.generate(tokens, max_new_tokens=12, do_sample=False, eos_token_id=data.end_of_text)
        assert line["tokens"] == expected[0, tokens.shape[1] :].tolist()
        assert line["text"] == data.decode(line["tokens"])


@pytest.mark.slow
def test_a_classifier_names_its_classes(tmp_path):
    pytest.importorskip("datasets", reason="needs the extra trainapp[hf]")
    folder = hf_files.tokenizer_folder(tmp_path / "tokenizer")
    data = ("data=hf", f"data.path={hf_files.texts(tmp_path / 't.jsonl')}", "data.label=label")
    data = (*data, f"data.tokenizer={folder}", f"data.cache_dir={tmp_path}")
    model = ("model=hf", "model.task=sequence_classification", hf_files.BERT)
    runs.run(tmp_path / "run", *model, *data, "optimizer.lr=0.003", "train.max_steps=8")
    alone, found = (  # how far texts are padded depends on the batch
        runs.infer("predict", tmp_path, tmp_path / "run", f"predict.batch_size={size}") for size in (1, 64)
    )
    assert [line["probability"] for line in found] == pytest.approx([line["probability"] for line in alone], rel=1e-4)
    assert {line["prediction_name"] for line in found} <= {"dog", "fox"}
    assert {0: "dog", 1: "fox"}[found[0]["prediction"]] == found[0]["prediction_name"]
