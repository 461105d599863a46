"""Models of Hugging Face's Transformers, small and with random weights, for `plan_accuracy.py --foreign`."""

from typing import Any

import torch
import transformers
from torch import Tensor, nn

DEPTH, HEADS, VOCABULARY, WIDTH = 2, 4, 512, 64
COMMON = {"hidden_size": WIDTH, "num_hidden_layers": DEPTH, "num_attention_heads": HEADS}
CAUSAL = COMMON | {
    "vocab_size": VOCABULARY, "intermediate_size": 2 * WIDTH, "num_key_value_heads": HEADS // 2,
    "max_position_embeddings": 256,
}  # fmt: skip


class Logits(nn.Module):
    """The logits of tokens. fixed: further arguments. masked: with the attention mask that a padded batch has, read in
    the forward.
    """

    def __init__(self, inner: nn.Module, masked: bool = False, **fixed: Any):
        super().__init__()
        self.inner, self.masked, self.fixed = inner, masked, fixed

    def forward(self, tokens: Tensor) -> Tensor:
        mask = torch.ones_like(tokens) if self.masked else None
        return self.inner(input_ids=tokens, attention_mask=mask, **self.fixed).logits


class Llama(Logits):
    """Causal language model."""

    def __init__(self, masked: bool = False, attention: str = "sdpa"):
        configuration = transformers.LlamaConfig(**CAUSAL, attn_implementation=attention)
        super().__init__(transformers.LlamaForCausalLM(configuration), masked, use_cache=False)


class Bert(Logits):
    """Masked language model."""

    def __init__(self, masked: bool = False):
        shape = COMMON | {"intermediate_size": 4 * WIDTH, "max_position_embeddings": 256}
        configuration = transformers.BertConfig(vocab_size=VOCABULARY, **shape)
        super().__init__(transformers.BertForMaskedLM(configuration), masked)


class ViT(nn.Module):
    """Image classifier on patches of 4 x 4."""

    def __init__(self) -> None:
        super().__init__()
        shape = COMMON | {"image_size": 32, "patch_size": 4, "intermediate_size": 4 * WIDTH, "num_labels": 10}
        self.inner = transformers.ViTForImageClassification(transformers.ViTConfig(**shape))

    def forward(self, images: Tensor) -> Tensor:
        return self.inner(pixel_values=images).logits


class T5(Logits):
    """Encoder and decoder on the same tokens."""

    def __init__(self) -> None:
        configuration = transformers.T5Config(
            vocab_size=VOCABULARY, d_model=WIDTH, d_kv=WIDTH // HEADS, d_ff=2 * WIDTH, num_layers=DEPTH,
            num_heads=HEADS, decoder_start_token_id=0,
        )  # fmt: skip
        super().__init__(transformers.T5ForConditionalGeneration(configuration), use_cache=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.inner(input_ids=tokens, decoder_input_ids=tokens, **self.fixed).logits


class Mixtral(Logits):
    """Causal language model with a mixture of experts."""

    def __init__(self, experts: str = "eager") -> None:
        configuration = transformers.MixtralConfig(**CAUSAL, num_local_experts=4, experts_implementation=experts)
        super().__init__(transformers.MixtralForCausalLM(configuration), use_cache=False)
