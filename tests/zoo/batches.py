"""Data sets whose batches are anything but a dict of tensors with the samples first, each with a loss that reads them.
Other containers: tests/data/test_batch.py.

Every batch also names its samples: `index_of(batch)`.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import default_collate

from .data import Tokens, Vectors


class Linear(nn.Module):
    """Logits [B, 4] of vectors [B, 8]; of the mean over the second dimension where there are three."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, inputs):
        logits = self.layers(inputs)
        return logits.mean(1) if logits.ndim == 3 else logits


class Bag(nn.Module):
    """Logits of bags of tokens: all tokens in one vector, and where each bag begins."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.EmbeddingBag(16, 8), nn.Linear(8, 4)

    def forward(self, tokens, offsets):
        return self.head(self.embed(tokens, offsets))


def cross_entropy(logits, targets):
    return F.cross_entropy(logits, targets, reduction="sum"), len(logits), {}


def of_dict(model, batch):
    return cross_entropy(model(batch["inputs"]), batch["targets"])


class Tuples(Vectors):
    def __getitem__(self, index):
        return self.inputs[index], self.targets[index], index


def of_sequence(model, batch):
    inputs, targets, _ = batch
    return cross_entropy(model(inputs), targets)


class Packed(Tokens):
    """Sequences one after the other in one vector: [sum of lengths] beside offsets and targets [B]."""

    def collate(self, samples):
        rows = [sample["inputs"][sample["inputs"] != 0] for sample in samples]
        lengths = torch.tensor([len(row) for row in rows])
        rest = default_collate([{"targets": s["targets"], "index": s["index"]} for s in samples])
        return {"tokens": torch.cat(rows), "offsets": lengths.cumsum(0) - lengths, **rest}


def of_packed(model, batch):
    return cross_entropy(model(batch["tokens"], batch["offsets"]), batch["targets"])


class SquareTimeFirst(Vectors):
    """[8, B, 8]: the samples are the second dimension. In a batch of 8 the shapes do not tell which is which."""

    def collate(self, samples):
        batch = default_collate(samples)
        batch["inputs"] = torch.stack([batch["inputs"].roll(time, 1) for time in range(8)])
        return batch


def of_time_first(model, batch):
    return cross_entropy(model(batch["inputs"].transpose(0, 1)), batch["targets"])


class Strings(Vectors):
    """Words, which the loss turns into numbers."""

    def __getitem__(self, index):
        return {**super().__getitem__(index), "words": " ".join("x" * (1 + index % 3) for _ in range(1 + index % 4))}


def of_strings(model, batch):
    assert len(batch["words"]) == len(batch["targets"])
    weights = 1 + torch.tensor([float(len(words)) for words in batch["words"]])
    inputs = batch["inputs"] * weights[:, None] / 8
    return cross_entropy(model(inputs), batch["targets"])


class WithTable(Vectors):
    """A table of 8 rows that belongs to no sample, beside batches of 8 samples."""

    def collate(self, samples):
        return {"table": torch.linspace(-1, 1, 64).reshape(8, 8), **default_collate(samples)}


def of_table(model, batch):
    inputs = batch["inputs"] + batch["table"][batch["targets"] * 2 + 1] + batch["table"].std(0)
    return cross_entropy(model(inputs), batch["targets"])


class Ragged(Tokens):
    """Padded to the longest sequence of the batch."""

    def collate(self, samples):
        batch = default_collate(samples)
        longest = int((batch["inputs"] != 0).sum(1).max())
        return {**batch, "inputs": batch["inputs"][:, :longest]}


class Padded(nn.Module):
    """Sums over the tokens, divided by the padded length: padding changes the result."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 4)

    def forward(self, tokens):
        return self.head((self.embed(tokens) * (tokens != 0)[..., None]).sum(1) / 8)


class Graphs(Vectors):
    """Nodes of all graphs in one table, edges by node, and the graph of each node."""

    def collate(self, samples):
        sizes = [2 + sample["index"] % 3 for sample in samples]
        nodes = torch.cat(
            [
                s["inputs"].expand(n, 8) * torch.arange(1, n + 1)[:, None] / n
                for s, n in zip(samples, sizes, strict=True)
            ]
        )
        graph = torch.repeat_interleave(torch.arange(len(samples)), torch.tensor(sizes))
        edges = torch.stack([torch.arange(len(graph) - 1), torch.arange(1, len(graph))])
        edges = edges[:, graph[edges[0]] == graph[edges[1]]]
        rest = default_collate([{"targets": s["targets"], "index": s["index"]} for s in samples])
        return {"nodes": nodes, "edges": edges, "graph": graph, **rest}


class GraphNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.message, self.head = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, nodes, edges, graph, graphs):
        nodes = nodes.index_add(0, edges[1], self.message(nodes[edges[0]]).tanh())
        return self.head(torch.zeros(graphs, 8).index_add(0, graph, nodes))


def of_graphs(model, batch):
    logits = model(batch["nodes"], batch["edges"], batch["graph"], len(batch["targets"]))
    return cross_entropy(logits, batch["targets"])


class SampleWeights(Vectors):
    """Importance weights far below 1: all of a step together weigh less than one sample."""

    def __getitem__(self, index):
        return {**super().__getitem__(index), "weight": 0.001 * (1 + index % 5)}


def of_sample_weights(model, batch):
    weights = batch["weight"].float()
    losses = F.cross_entropy(model(batch["inputs"]), batch["targets"], reduction="none")
    return (weights * losses).sum(), weights.sum(), {}


def index_of(batch):
    """The samples' indices in the data set, from a batch of any of these kinds."""
    if isinstance(batch, (tuple, list)):
        return batch[2]
    return batch["index"]
