"""Configurations of models that are not trainapp's own, for `plan_accuracy.py --foreign`."""

import importlib.util
from collections.abc import Iterator
from typing import Any

Case = tuple[str, tuple[str, ...]]  # family, overrides
IMAGES = ("data=synthetic_images", "data.size=100", "data.val_size=32", "batch.global_size=16")
TOKENS = (
    "data=synthetic_tokens", "data.vocab_size=512", "data.context_length=64", "data.size=100", "data.val_size=32",
    "batch.global_size=16",
)  # fmt: skip
ADAFACTOR, MUON, SGD = ("optimizer=adafactor",), ("optimizer=muon",), ("optimizer=sgd",)
BF16, SMALL, AVERAGE = ("precision=bf16",), ("batch.micro_size=4",), ("train.ema=0.99",)
NO_UPDATE = ("train.grad_clip=null",)


def model(name: str, data: tuple[str, ...], *arguments: str) -> tuple[str, ...]:
    """Overrides that choose a class of `foreign_models` or `foreign_transformers`."""
    room = name.partition(".")[0]
    own = (f"model._target_={name}", f"user_packages=[{room}]", "~model.width", "~model.depth", "~model.dropout")
    return (*data, "model=mlp", *own, *(f"+model.{argument}" for argument in arguments))


def cases() -> Iterator[Case]:
    """Every model in fp32 and bf16, in one micro-batch and in several; some with other optimizers and an average."""
    for family, chosen, *others in models():
        yield family, chosen
        for more in (BF16, SMALL, *others):
            yield family, (*chosen, *more)


def models() -> Iterator[tuple[Any, ...]]:
    """Family, overrides, and what else is tried. Those of Transformers only with the package."""

    def image(name: str, *arguments: str) -> tuple[str, ...]:
        return model(f"foreign_models.{name}", IMAGES, *arguments)

    def text(name: str, *arguments: str) -> tuple[str, ...]:
        return model(f"foreign_models.{name}", TOKENS, *arguments)

    yield "U-Net", image("UNet"), SGD, AVERAGE, (*BF16, *SMALL)
    yield "ConvNeXt", image("ConvNeXt"), SGD, MUON
    yield "LSTM", text("Recurrent"), SGD, AVERAGE
    yield "LSTM", text("Recurrent", "bidirectional=true", "width=100")
    yield "GRU", text("Recurrent", "kind=GRU")
    yield "packed LSTM", text("Packed")
    yield "experts", text("Experts"), SGD, ADAFACTOR
    yield "experts", text("Experts", "top=1", "count=8")
    yield "experts", text("Experts", "form=one-hot")
    yield "early exit", image("EarlyExit")
    yield "early exit", image("EarlyExit", "sure=0")
    yield ".item()", image("ReadsItem"), NO_UPDATE
    for how in ("mask", "index", "unique"):
        yield f"selects by {how}", image("Selects", f"how={how}")
    yield "own autograd.Function", image("OwnFunction"), SGD, AVERAGE
    yield "tied weights", text("Tied"), SGD, ADAFACTOR, AVERAGE
    yield "lazy", image("Lazy"), AVERAGE
    yield "bf16 when built", text("HalfWhenBuilt"), SGD
    if importlib.util.find_spec("transformers") is None:
        return

    def next_token(name: str, *arguments: str) -> tuple[str, ...]:
        return model(f"foreign_transformers.{name}", (*TOKENS, "task=next_token"), *arguments)

    yield "Llama", next_token("Llama"), SGD, ADAFACTOR, (*BF16, *SMALL)
    yield "Llama", next_token("Llama", "masked=true")
    yield "Llama", next_token("Llama", "attention=eager")
    yield "BERT", next_token("Bert"), SGD
    yield "BERT", next_token("Bert", "masked=true")
    yield "ViT", model("foreign_transformers.ViT", IMAGES), SGD, AVERAGE
    yield "T5", next_token("T5"), SGD, (*BF16, *SMALL)
    yield "Mixtral", next_token("Mixtral"), SGD
    yield "Mixtral", next_token("Mixtral", "experts=grouped_mm")
