"""The built-in data sets' YAML files: what they set is what the classes take."""

import importlib
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from torch.utils.data import default_collate

from trainapp.config.arguments import check_arguments

CONF = Path(__file__).parents[2] / "conf" / "data"


def build(name, split, model=None):
    settings = OmegaConf.create({"data": OmegaConf.load(CONF / f"{name}.yaml"), "model": model or {}})
    arguments = OmegaConf.to_container(settings.data, resolve=True)
    module, _, attribute = arguments.pop("_target_").rpartition(".")
    target = getattr(importlib.import_module(module), attribute)
    assert check_arguments(target, arguments, "data", provided=("split", "seed")) == []
    return target(split=split, **arguments)


@pytest.mark.parametrize(
    ("name", "train_size", "val_size", "shape"),
    [
        ("digits", 1437, 360, (3, 1, 8, 8)),
        ("text", None, None, (3, 128)),
        ("synthetic_images", 1024, 256, (3, 3, 32, 32)),
        ("synthetic_tokens", 1024, 256, (3, 128)),
    ],
)
def test_every_option_builds(name, train_size, val_size, shape):
    for split, size in (("train", train_size), ("val", val_size)):
        data = build(name, split)
        assert size is None or len(data) == size
        batch, collated = data.__getitems__([0, 2, 1]), default_collate([data[index] for index in (0, 2, 1)])
        assert batch["inputs"].shape == shape
        assert batch["targets"].dtype == torch.int64
        assert all(batch[key].is_contiguous() and torch.equal(batch[key], collated[key]) for key in collated)
        for index in (-1, len(data)):
            with pytest.raises(IndexError, match=rf"\[0, {len(data)}\)"):
                data[index]


@pytest.mark.parametrize("name", ["text", "synthetic_tokens"])
def test_context_length_is_the_models(name):
    assert build(name, "train", {"context_length": 24})[0]["inputs"].shape == (24,)
