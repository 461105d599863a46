"""Inference with models of Transformers: their cache, LoRA, tokenizers and the names of classes."""

import json

import pytest
import runs
import torch

pytest.importorskip("transformers", reason="needs the extra trainapp[hf]")

import hf_files
from transformers import AutoConfig, AutoModelForCausalLM

from trainapp.inference.decoder import CachedByTransformers, Uncached, decoder_of

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 60}
KINDS = {
    "llama": SIZES | {"intermediate_size": 48},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 60},  # learned positions
    "mistral": SIZES | {"intermediate_size": 48, "num_key_value_heads": 1, "sliding_window": 4},
}
STATEFUL = SIZES | {"intermediate_size": 48, "num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 8}
QUIET = ("train.device=cpu", "memory.guard=false", "tracker=[]")


@pytest.mark.parametrize("kind", KINDS)
def test_the_cache_gives_the_same_logits(kind):
    """Although `use_cache` is off in the configuration. The control: a cache that is forgotten gives others."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, use_cache=False, **KINDS[kind])).eval()
    for parameter in model.parameters():
        parameter.data *= 4 if parameter.ndim > 1 else 1
    cached, forgetful, plain = decoder_of(model, 20), CachedByTransformers(model), Uncached(model)
    assert isinstance(cached, CachedByTransformers)
    forgotten = []
    with torch.inference_mode():
        for piece in torch.randint(60, (3, 12)).split([5, 1, 1, 1, 3, 1], dim=1):
            expected = plain(piece)
            torch.testing.assert_close(cached(piece), expected, rtol=0, atol=1e-5)
            forgotten.append((forgetful(piece) - expected).abs().max())
            forgetful._past = None
    assert min(forgotten[1:]) > 1e-2


def run(folder, *overrides):
    runs.runner.run(runs.compose.from_command_line([*QUIET, *overrides], str(folder)))


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_a_llama_with_lora_answers(tmp_path):
    """With what its examples end with, and as Transformers itself continues the prompt."""
    pytest.importorskip("peft", reason="needs the extra trainapp[peft]")
    folder = hf_files.model_folder(tmp_path / "model")
    data = ("data=sft", f"data.files={hf_files.examples(tmp_path / 'chat.jsonl')}", f"data.cache_dir={tmp_path}")
    model = ("model=hf", "model.task=causal_lm", f"model.path={folder}", "adapter=lora")
    runs.run(tmp_path / "run", *model, *data, "optimizer.lr=0.01", "train.max_steps=20")
    prompts = ["the fox over 1:", "the fox jumps over 2:"]
    wanted = ("mode=generate", f"checkpointing.resume={tmp_path / 'run'}", f"generate.prompts={json.dumps(prompts)}")
    run(tmp_path / "out", *wanted, "generate.temperature=0", "generate.max_new_tokens=12")
    found = lines(tmp_path / "out/generations.jsonl")
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
    for size in (1, 64):  # how far texts are padded depends on the batch
        run(
            tmp_path / f"{size}",
            "mode=predict",
            f"checkpointing.resume={tmp_path / 'run'}",
            f"predict.batch_size={size}",
        )
    found, alone = lines(tmp_path / "64/predictions.jsonl"), lines(tmp_path / "1/predictions.jsonl")
    assert [line["probability"] for line in found] == pytest.approx([line["probability"] for line in alone], rel=1e-4)
    assert {line["prediction_name"] for line in found} <= {"dog", "fox"}
    assert {0: "dog", 1: "fox"}[found[0]["prediction"]] == found[0]["prediction_name"]


def test_factors_that_change_with_the_length_do_not_depend_on_the_batch():
    """Phi-3's `longrope`. The control: Transformers' cache alone keeps keys of short texts in long ones."""
    torch.manual_seed(0)
    factors = {"short_factor": [1.0] * 8, "long_factor": [8.0] * 8, "original_max_position_embeddings": 8}
    sizes = SIZES | {"intermediate_size": 48, "max_position_embeddings": 64, "pad_token_id": 0}
    settings = AutoConfig.for_model(
        "phi3", **sizes, original_max_position_embeddings=8, rope_parameters={"rope_type": "longrope", **factors}
    )
    model = AutoModelForCausalLM.from_config(settings).eval()
    for parameter in model.parameters():
        parameter.data *= 4 if parameter.ndim > 1 else 1
    tokens = torch.randint(60, (2, 14))
    whole, pieces, plain = decoder_of(model, 20), decoder_of(model, 20), decoder_of(model, 20)
    plain._borders = set()
    with torch.inference_mode():
        alone = [whole(part) for part in tokens.split([12, 1, 1], dim=1)]
        together = [pieces(part) for part in tokens.split([3, *[1] * 11], dim=1)]
        kept = [plain(part) for part in tokens.split([3, *[1] * 11], dim=1)]
    for own, other, wrong in zip(alone, together[-3:], kept[-3:], strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=1e-4)
        assert (own - wrong).abs().max() > 1e-2


def test_a_model_that_returns_no_cache_reads_the_whole_text():
    """Its modules keep states, which other batches must not find."""
    torch.manual_seed(0)
    settings = AutoConfig.for_model("recurrent_gemma", use_cache=False, num_key_value_heads=1, **STATEFUL)
    model = AutoModelForCausalLM.from_config(settings).eval()
    tokens = torch.randint(60, (3, 6))
    with torch.inference_mode():
        expected = model(tokens).logits[:, -1]
        for rows in (3, 1, 2):
            decoder = decoder_of(model, 20)
            for piece in tokens[:rows].split([3, 1, 2], dim=1):
                found = decoder(piece)
            torch.testing.assert_close(found, expected[:rows], rtol=0, atol=1e-5)
