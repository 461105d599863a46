"""Models of Hugging Face's Transformers, small and with random weights, for `plan_accuracy.py --foreign`."""

import torch
import transformers
from torch import Tensor, nn

VOCABULARY, WIDTH, DEPTH, HEADS = 512, 64, 2, 4


class Llama(nn.Module):
    """Causal language model. masked: with the attention mask that a padded batch has, read in the forward."""

    def __init__(self, masked: bool = False, attention: str = "sdpa"):
        super().__init__()
        self.masked = masked
        self.inner = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=DEPTH,
                num_attention_heads=HEADS, num_key_value_heads=HEADS // 2, max_position_embeddings=256,
                attn_implementation=attention,
            )
        )  # fmt: skip

    def forward(self, tokens: Tensor) -> Tensor:
        mask = torch.ones_like(tokens) if self.masked else None
        return self.inner(input_ids=tokens, attention_mask=mask, use_cache=False).logits


class Bert(nn.Module):
    """Masked language model."""

    def __init__(self, masked: bool = False):
        super().__init__()
        self.masked = masked
        self.inner = transformers.BertForMaskedLM(
            transformers.BertConfig(
                vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=DEPTH, num_attention_heads=HEADS,
                intermediate_size=4 * WIDTH, max_position_embeddings=256,
            )
        )  # fmt: skip

    def forward(self, tokens: Tensor) -> Tensor:
        mask = torch.ones_like(tokens) if self.masked else None
        return self.inner(input_ids=tokens, attention_mask=mask).logits


class ViT(nn.Module):
    """Image classifier on patches of 4 x 4."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = transformers.ViTForImageClassification(
            transformers.ViTConfig(
                image_size=32, patch_size=4, hidden_size=WIDTH, num_hidden_layers=DEPTH, num_attention_heads=HEADS,
                intermediate_size=4 * WIDTH, num_labels=10,
            )
        )  # fmt: skip

    def forward(self, images: Tensor) -> Tensor:
        return self.inner(pixel_values=images).logits


class T5(nn.Module):
    """Encoder and decoder on the same tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = transformers.T5ForConditionalGeneration(
            transformers.T5Config(
                vocab_size=VOCABULARY, d_model=WIDTH, d_kv=WIDTH // HEADS, d_ff=2 * WIDTH, num_layers=DEPTH,
                num_heads=HEADS, decoder_start_token_id=0,
            )
        )  # fmt: skip

    def forward(self, tokens: Tensor) -> Tensor:
        return self.inner(input_ids=tokens, decoder_input_ids=tokens, use_cache=False).logits


class Mixtral(nn.Module):
    """Causal language model with a mixture of experts."""

    def __init__(self, experts: str = "eager") -> None:
        super().__init__()
        configuration = transformers.MixtralConfig(
            vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=DEPTH,
            num_attention_heads=HEADS, num_key_value_heads=HEADS // 2, num_local_experts=4, max_position_embeddings=256,
            experts_implementation=experts,
        )  # fmt: skip
        self.inner = transformers.MixtralForCausalLM(configuration)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.inner(input_ids=tokens, use_cache=False).logits
