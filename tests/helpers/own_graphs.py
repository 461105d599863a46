"""A graph network on digits, whose adjacency matrix is sparse, as users write one: 64 pixels are the nodes."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LAYOUTS = {"coo": torch.sparse_coo, "csr": torch.sparse_csr, "dense": torch.strided}
PLACES = ("buffer", "constant", "attribute")


def adjacency(layout: str) -> Tensor:
    """[64, 64]: each pixel of 8 x 8 is joined to its neighbours and itself."""
    row, column = torch.arange(64) // 8, torch.arange(64) % 8
    distance = (row[:, None] - row).abs() + (column[:, None] - column).abs()
    joined = (distance <= 1).float()
    matrix = joined / joined.sum(1, keepdim=True)
    return matrix if layout == "dense" else matrix.to_sparse(layout=LAYOUTS[layout])


class GraphNet(nn.Module):
    """Nodes come first, so that one product is that of all samples: [64, B * width]. place: of the matrix."""

    def __init__(self, num_classes: int, layout: str = "coo", place: str = "buffer", dropout: float = 0.3):
        super().__init__()
        self.embed, self.head, self.dropout = nn.Linear(1, 4), nn.Linear(64 * 4, num_classes), dropout
        matrix = adjacency(layout)
        if place == "attribute":
            self.adjacency = matrix
        else:
            self.register_buffer("adjacency", matrix, persistent=place == "buffer")

    def forward(self, inputs: Tensor) -> Tensor:
        nodes = self.embed(inputs.flatten(1).t()[..., None])  # [64, B, 4]
        nodes = F.dropout(nodes, self.dropout, self.training)
        mixed = self.adjacency @ nodes.flatten(1)
        mixed = F.dropout(F.relu(mixed).view(nodes.shape), self.dropout, self.training)
        return self.head(mixed.transpose(0, 1).flatten(1))


def total(model, batch):
    """The sum of the cross-entropies."""
    return F.cross_entropy(model(batch["inputs"]), batch["targets"], reduction="sum"), len(batch["targets"]), {}


def mean(model, batch):
    """Their mean, which is wrong."""
    loss, count, metrics = total(model, batch)
    return loss / count, count, metrics
