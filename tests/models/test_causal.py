"""A language model that reads what it is to predict is refused before it trains."""

import hf_files
import pytest
import torch

from trainapp.errors import UserError

pytest.importorskip("transformers", reason="needs the extra trainapp[hf]")

from trainapp.models.huggingface import build

XLNET = {"model_type": "xlnet", "d_model": 32, "n_layer": 2, "n_head": 2, "d_inner": 48, "vocab_size": 64}
KINDS = {
    "llama": hf_files.SIZES,
    "mistral": {**hf_files.SIZES, "num_key_value_heads": 1, "sliding_window": 4},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2},
    "recurrent_gemma": {
        **hf_files.SIZES,
        "num_hidden_layers": 3,
        "lru_width": 32,
        "attention_window_size": 8,
        "num_key_value_heads": 1,
    },
    "bert": {**hf_files.SIZES, "is_decoder": True},
}


@pytest.mark.parametrize("kind", KINDS)
def test_models_that_read_from_left_to_right(kind):
    before = torch.get_rng_state()
    model = build("causal_lm", {"model_type": kind, **KINDS[kind], "vocab_size": 64})
    assert model.training
    assert not torch.equal(torch.get_rng_state(), before)  # the weights were drawn


@pytest.mark.parametrize("config", [{"model_type": "bert", **hf_files.SIZES, "vocab_size": 64}, XLNET])
def test_those_that_see_later_tokens_are_refused(config):
    with pytest.raises(
        UserError, match=r"model\.task=causal_lm: .* attends to later tokens, so it would see the tokens"
    ):
        build("causal_lm", config, context_length=16)
    for seed in range(4):  # whatever the weights
        torch.manual_seed(seed)
        with pytest.raises(UserError, match="attends to later tokens"):
            build("causal_lm", config, context_length=16)
    build("sequence_classification", config, num_classes=3, context_length=16)
