"""Small data sets: vectors, images, token sequences. Samples are dicts with their index in the data set."""

import torch


class Vectors:
    """`inputs` [8], `targets` in 0..3: which of four fixed directions is closest."""

    in_memory = True

    def __init__(self, split, seed=0, size=40, val_size=12):
        generator = torch.Generator().manual_seed(2 * seed + (split == "val"))
        self.inputs = torch.randn(size if split == "train" else val_size, 8, generator=generator)
        directions = torch.linspace(-1, 1, 32).reshape(4, 8).sin()
        self.targets = (self.inputs @ directions.T).argmax(1)

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        return {"inputs": self.inputs[index], "targets": self.targets[index], "index": index}


class Tokens(Vectors):
    """`inputs` [12] in 0..15, where 0 is padding: sequences of 4 to 12 tokens; `targets` as of the vectors."""

    def __init__(self, split, seed=0, size=40, val_size=12):
        super().__init__(split, seed, size, val_size)
        generator = torch.Generator().manual_seed(100 + seed)
        samples = len(self.targets)
        self.lengths = torch.randint(4, 13, (samples,), generator=generator)
        tokens = (torch.randint(1, 12, (samples, 12), generator=generator) + self.targets[:, None]).clamp(max=15)
        self.inputs = torch.where(torch.arange(12) < self.lengths[:, None], tokens, 0)


class Spoiled(Vectors):
    """Samples that no loss can digest: the inputs of these of the training split are infinite."""

    def __init__(self, split, seed=0, size=40, val_size=12, spoiled=()):
        super().__init__(split, seed, size, val_size)
        if split == "train":
            self.inputs[[index for index in spoiled if index < size]] = torch.inf
