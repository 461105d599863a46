"""Small files as users of Transformers have them: a folder with a model and its tokenizer, examples, tables."""

import json
from pathlib import Path

import torch

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
LLAMA = f"model.config={{model_type: llama, {', '.join(f'{name}: {size}' for name, size in SIZES.items())}}}"
BERT = LLAMA.replace("llama", "bert")
CAUSAL = ("model=hf", "model.task=causal_lm", LLAMA)


def tokenizer_folder(folder: Path) -> Path:
    """A byte-level BPE of 300 tokens with a chat template."""
    from transformers import AutoTokenizer

    from trainapp.data.sets.tokenized import train_bpe

    made = train_bpe(lambda: ["the quick brown fox jumps over the lazy dog"] * 20, "fox", 300, folder.parent)
    tokenizer = AutoTokenizer.from_pretrained(made)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def model_folder(folder: Path, seed: int = 0, **changes) -> Path:
    """A Llama with random weights, as `save_pretrained` writes it, with its tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer_folder(folder)
    torch.manual_seed(seed)
    LlamaForCausalLM(LlamaConfig(vocab_size=300, **SIZES, **changes)).save_pretrained(folder)
    return folder


def examples(path: Path, count: int = 40) -> Path:
    """Prompts and answers of different lengths."""
    rows = [
        {"prompt": f"the fox {'jumps ' * (n % 5)}over {n}:", "answer": f" the lazy dog{' dog' * (n % 7)}"}
        for n in range(count)
    ]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


def texts(path: Path, count: int = 60) -> Path:
    """Labelled texts as JSON lines: long ones about dogs, short ones about foxes."""
    rows = [
        {"text": "the lazy dog " * (2 + n % 3) if n % 2 else "the quick fox", "label": "dog" if n % 2 else "fox"}
        for n in range(count)
    ]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path
