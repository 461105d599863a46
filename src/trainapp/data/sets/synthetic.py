"""Generated, learnable data for tests, benchmarks and trying out sizes. Each sample is a function of
(seed, split, index), generated when it is fetched, so a data set of any size costs no memory."""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch

from trainapp.data.loader import BatchedDataset
from trainapp.data.stateless_random import uniform
from trainapp.validation import NonNegativeFloat, NonNegativeInt, PositiveInt

# Passed to `uniform` as the epoch: synthetic samples are the same in every epoch and differ between splits.
STREAMS = {"train": 0, "val": 1}

GRID = 4  # a prototype is GRID x GRID patches of random colour: large enough to survive strides and pooling
NOISE_OFFSETS = 1 << 20

# Distances to the next token on the hidden cycle, and their probabilities.
STEPS = np.array([1, 2, 3])
PROBABILITIES = np.array([0.7, 0.2, 0.1])


class SyntheticImages(BatchedDataset):
    """One random prototype per class plus noise: inputs float32 [B, C, H, W] of about unit variance,
    targets int64 [B]. Sample i has the class i modulo num_classes.

    Args:
        split: train or val, whose samples have different noise.
        seed: of the prototypes and the noise.
        size: the number of training samples.
        val_size: the number of validation samples.
        image_shape: (C, H, W).
        num_classes: the number of prototypes.
        noise: its standard deviation; that of the prototypes is 1.
    """

    task = "classification"

    def __init__(
        self,
        split: Literal["train", "val"],
        seed: NonNegativeInt = 0,
        size: PositiveInt = 1024,
        val_size: PositiveInt = 256,
        image_shape: tuple[PositiveInt, PositiveInt, PositiveInt] = (3, 32, 32),
        num_classes: PositiveInt = 10,
        noise: NonNegativeFloat = 1.0,
    ):
        channels, height, width = image_shape
        self.spec: dict[str, Any] = {"image_shape": (channels, height, width), "num_classes": num_classes}
        self.size = size if split == "train" else val_size
        self.seed = seed
        self.stream = STREAMS[split]
        self.num_classes = num_classes
        generator = np.random.default_rng(seed)
        scale = np.float32(1 / np.sqrt(1 + noise**2))  # gives the sum of prototype and noise unit variance

        # A prototype per class: its patches' colours, enlarged to the image's size.
        patches = generator.standard_normal((num_classes, channels, GRID, GRID), dtype=np.float32)
        rows = np.arange(height) * GRID // height  # the patch that each row of pixels lies in
        columns = np.arange(width) * GRID // width
        prototypes = (patches * scale)[:, :, rows[:, None], columns]
        self._prototypes = np.ascontiguousarray(prototypes)

        # A sample's noise is a slice of one long random sequence: copying is 20 times faster than drawing.
        length = NOISE_OFFSETS + channels * height * width
        self._noise = generator.standard_normal(length, dtype=np.float32) * (scale * np.float32(noise))

    def __len__(self) -> int:
        return self.size

    @property
    def targets(self) -> np.ndarray:
        """The class of each sample, for `data.sampling.weights=balanced`."""
        return np.resize(np.arange(self.num_classes), self.size)

    def __getitems__(self, indices: Sequence[int]) -> dict[str, torch.Tensor]:
        positions = self._positions(indices)
        targets = positions % self.num_classes

        # The offset of each sample's slice of the noise.
        draws = uniform(self.seed, self.stream, positions, 1)[:, 0]
        offsets = (draws * NOISE_OFFSETS).astype(np.int64)

        # A loop, because gathering both parts first costs 8 times as much for large images.
        images = np.empty((len(positions), *self.spec["image_shape"]), dtype=np.float32)
        for image, offset, target in zip(images, offsets.tolist(), targets.tolist(), strict=True):
            noise = self._noise[offset : offset + image.size].reshape(image.shape)
            np.add(self._prototypes[target], noise, out=image)
        return {"inputs": torch.from_numpy(images), "targets": torch.from_numpy(targets)}


class SyntheticTokens(BatchedDataset):
    """A Markov chain: inputs int64 [B, T], targets int64 [B, T] the same shifted by one, -100 where padded.

    The tokens lie on a hidden cycle, a permutation of the vocabulary drawn from the seed; each token is
    followed by the one 1, 2 or 3 places further on with probability 0.7, 0.2 and 0.1. The best reachable loss
    is the entropy of that choice, 0.802 nats (less where vocab_size is below 3).

    Args:
        split: train or val, whose sequences differ.
        seed: of the cycle and the tokens.
        size: the number of training samples.
        val_size: the number of validation samples.
        vocab_size: the number of different tokens.
        context_length: T, or the largest T with `min_length`.
        min_length: None gives every sequence `context_length` tokens; a number draws lengths uniformly from it to
            `context_length` and pads each batch to its longest with inputs 0 and targets -100.

    Raises ValueError for a min_length above context_length.
    """

    task = "next_token"

    def __init__(
        self,
        split: Literal["train", "val"],
        seed: NonNegativeInt = 0,
        size: PositiveInt = 1024,
        val_size: PositiveInt = 256,
        vocab_size: PositiveInt = 256,
        context_length: PositiveInt = 128,
        min_length: PositiveInt | None = None,
    ):
        if min_length is not None and min_length > context_length:
            raise ValueError(f"min_length={min_length} is above context_length={context_length}: lower it or use null")
        self.spec: dict[str, Any] = {"vocab_size": vocab_size, "context_length": context_length}
        self.size = size if split == "train" else val_size
        self.seed = seed
        self.stream = STREAMS[split]
        self.vocab_size = vocab_size
        self.context_length = context_length
        self.min_length = min_length
        self._cycle = np.random.default_rng(seed).permutation(vocab_size)

    def __len__(self) -> int:
        return self.size

    def __getitems__(self, indices: Sequence[int]) -> dict[str, torch.Tensor]:
        # One row per sample. Column 0 draws the length, column 1 the first token, the others one step each.
        positions = self._positions(indices)
        draws = uniform(self.seed, self.stream, positions, self.context_length + 2)

        # Walk around the cycle: the first step leads from its start to the first token.
        probabilities_up_to = np.cumsum(PROBABILITIES)[:-1]
        step_choices = np.searchsorted(probabilities_up_to, draws[:, 1:], side="right")
        steps = STEPS[step_choices]
        steps[:, 0] = draws[:, 1] * self.vocab_size
        cycle_positions = np.cumsum(steps, axis=1) % self.vocab_size
        tokens = self._cycle[cycle_positions]
        inputs = tokens[:, :-1].copy()
        targets = tokens[:, 1:].copy()

        # Draw the lengths, and pad the sequences to the longest of the batch.
        if self.min_length is not None:
            choices = self.context_length - self.min_length + 1
            lengths = self.min_length + (draws[:, 0] * choices).astype(np.int64)
            longest = int(lengths.max(initial=0))
            is_padding = np.arange(longest) >= lengths[:, None]
            inputs = np.where(is_padding, 0, inputs[:, :longest])
            targets = np.where(is_padding, -100, targets[:, :longest])
        return {"inputs": torch.from_numpy(inputs), "targets": torch.from_numpy(targets)}
