"""Streams as users write them: digits with noise, one after the other."""

import copy
import itertools
import multiprocessing
import time

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset

from trainapp.data.sets.digits import Digits


class Plain(IterableDataset):
    """Without a state. Each epoch begins elsewhere; the noise is from the global generator."""

    task = "classification"

    def __init__(self, split, samples: int = 50, val_samples: int = 20):
        self.digits = Digits(split)
        self.spec = self.digits.spec
        self.samples = samples if split == "train" else val_samples
        self.epoch, self.numbers = 0, range(self.samples)

    def set_epoch(self, epoch):
        self.epoch = epoch

    def sample(self, number):
        sample = self.digits[(number + 7 * self.epoch) % len(self.digits)]
        return {**sample, "inputs": sample["inputs"] + 0.1 * torch.randn(1, 8, 8), "number": number}

    def __iter__(self):
        return map(self.sample, self.numbers)


class Stateful(Plain):
    """Says where it is: how many samples it has yielded."""

    def __init__(self, split, samples: int = 50, val_samples: int = 20):
        super().__init__(split, samples, val_samples)
        self.position = self.start = 0

    def __iter__(self):
        self.position, self.start = self.start, 0
        while self.position < len(self.numbers):
            self.position += 1
            yield self.sample(self.numbers[self.position - 1])

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.start = state["position"]


class Endless(Plain):
    """Training data has no end."""

    def __iter__(self):
        numbers = itertools.count() if self.samples == 50 else self.numbers
        return map(self.sample, numbers)


class TellsItsLength(Plain):
    def __len__(self):
        return self.samples


class Sharded(Stateful):
    """Can be read in shards."""

    def shard(self, index, count):
        part = copy.copy(self)
        part.numbers = self.numbers[index::count]
        return part


class DividedByRank(Plain):
    """As code for plain DDP has it: each rank reads a part of its own."""

    def __iter__(self):
        parts = dist.get_world_size() if dist.is_initialized() else 1
        return itertools.islice(super().__iter__(), dist.get_rank() if parts > 1 else 0, None, parts)


class Popping(Plain):
    """Its collate takes the samples apart."""

    def collate(self, samples):
        batch = {name: [sample.pop(name) for sample in samples] for name in list(samples[0])}
        return {name: torch.stack([torch.as_tensor(value) for value in values]) for name, values in batch.items()}


class Hungry(Plain):
    """Memory runs out once, at one of its samples, after which the iterator has ended."""

    def __init__(self, split):
        super().__init__(split)
        self.hungry = multiprocessing.Value("i", 1)  # shared with the processes that read

    def sample(self, number):
        if number == 38 and self.hungry.value:
            self.hungry.value = 0
            raise MemoryError
        return super().sample(number)

    def __iter__(self):
        for number in self.numbers:
            yield self.sample(number)


class HungryWithState(Hungry, Stateful):
    """The same, but its iterator continues after the sample that is lost."""

    def __iter__(self):
        self.position, self.start = self.start, 0
        return self

    def __next__(self):
        if self.position == len(self.numbers):
            raise StopIteration
        self.position += 1
        return self.sample(self.position - 1)


class Late(Stateful):
    """Counts a sample only after it was yielded, when it is asked for the next one."""

    def __iter__(self):
        self.position, self.start = self.start, 0
        while self.position < len(self.numbers):
            yield self.sample(self.numbers[self.position])
            self.position += 1


class Slow(Plain):
    """Waits for each sample."""

    def sample(self, number):
        time.sleep(0.005)
        return super().sample(number)


class TellsEpochs(Plain):
    """Its order depends on how often it was read, which its state says."""

    def __init__(self, split, samples: int = 50, val_samples: int = 20):
        super().__init__(split, samples, val_samples)
        self.passes, self.position, self.continues = 0, 0, False

    def sample(self, number):
        return {**self.digits[number], "number": number}

    def __iter__(self):
        if not self.continues:
            self.passes, self.position = self.passes + 1, 0
        self.continues = False
        order = np.random.default_rng(self.passes).permutation(len(self.numbers)).tolist()
        while self.position < len(order):
            self.position += 1
            yield self.sample(order[self.position - 1])

    def state_dict(self):
        return {"passes": self.passes, "position": self.position}

    def load_state_dict(self, state):
        self.passes, self.position, self.continues = state["passes"], state["position"], True


class Once(Plain):
    """Has nothing more to yield after its end."""

    def __init__(self, split, samples: int = 50, val_samples: int = 20):
        super().__init__(split, samples, val_samples)
        self.iterator = map(self.sample, self.numbers)

    def __iter__(self):
        return self.iterator


def indexed_validation(split):
    """A stream to train on, and a data set to evaluate."""
    return Stateful(split) if split == "train" else Digits(split)


def from_json(split, files: str, buffer: int = 0, shuffle_seed: int | None = 3):
    """Hugging Face's streaming data set over JSON files of images and targets."""
    from datasets import load_dataset

    if split == "val":
        return None
    stream = load_dataset("json", data_files=files, split="train", streaming=True)
    if buffer:
        stream = stream.shuffle(seed=shuffle_seed, buffer_size=buffer)
    return stream.map(_tensors)


def _tensors(row):
    inputs = torch.tensor(row["inputs"], dtype=torch.float32).view(1, 8, 8)
    return {"inputs": inputs + 0.1 * torch.randn(1, 8, 8), "targets": row["targets"]}
