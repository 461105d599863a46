"""What a compiled graph that is split into forward and backward needs, read from its operations."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node

from trainapp.techniques.block_trace import draws
from trainapp.torch_compiler import Halves, value_of
from trainapp.torch_private import storage_id, tree_leaves


class Split(NamedTuple):
    """A graph split at one share. Sizes are bytes, without the graph's inputs.

    kept: saved from forward to backward. forward, between, backward: the highest sums of what lives during each;
    between the two halves that is what is saved and what the graph returns.
    draws_again: whether random numbers of the forward are drawn a second time. They would be others.
    """

    share: float
    kept: int
    forward: int
    between: int
    backward: int
    draws_again: bool = False


def measured(share: float, halves: Halves, outputs: int, given: set[int] | None = None) -> Split:
    """What a split keeps and needs. outputs: how many results of the forward half are not for its backward.

    given: the storages that exist anyway, such as those of parameters; None: those of all inputs, for a graph that is
    called with the batch itself. Operations are taken in their order in the graph.
    """
    forward, backward = halves[0].graph, halves[1].graph
    given = storages_of_inputs(forward) if given is None else given
    results: Any = forward.output_node().args[0]
    returned, saved = [_nodes(part) for part in (results[:outputs], results[outputs:])]
    kept = {key: size for key, size in _storages(saved).items() if key not in given}
    alone = {key: size for key, size in _storages(returned).items() if key not in given and key not in kept}
    names = {node.name for node in saved}
    gradients = [node for node in backward.nodes if node.op == "placeholder" and node.name not in names]
    drawn = {node.name for node in forward.nodes if draws_numbers(node)}
    return Split(
        share,
        sum(kept.values()),
        _highest(forward, given),
        sum(kept.values()) + sum(alone.values()),
        _highest(backward, given, until_the_end=_storages(gradients)),  # autograd holds on to them
        any(draws_numbers(node) and node.name in drawn for node in backward.nodes),
    )


def _highest(graph: Graph, given: set[int], until_the_end: Iterable[int] = ()) -> int:
    """The highest sum of bytes that live while the graph runs, without the storages of `given`.

    An input counts from the start to its last use, a result from its operation on; what the graph returns, to the end.
    """
    nodes = list(graph.nodes)
    last: dict[int, int] = {}
    for place, node in enumerate(nodes):
        for key in _storages([node, *node.all_input_nodes]):
            last[key] = place
    last |= dict.fromkeys(until_the_end, len(nodes))
    live: dict[int, int] = {}
    total = highest = 0
    for place, node in enumerate(nodes):
        for key, size in _storages([node]).items():
            if key not in given and key not in live:
                live[key] = size
                total += size
        highest = max(highest, total)
        for key in _storages([node, *node.all_input_nodes]):
            if last[key] <= place and node.op != "placeholder":
                total -= live.pop(key, 0)
    return highest


def storages_of_inputs(graph: Graph, places: Sequence[int] | None = None) -> set[int]:
    """The storages of the graph's inputs, or of those at `places`."""
    nodes = [node for node in graph.nodes if node.op == "placeholder"]
    return set(_storages(nodes if places is None else [nodes[place] for place in places]))


def _storages(nodes: Iterable[Node]) -> dict[int, int]:
    """Bytes by storage of the tensors that these nodes compute."""
    tensors = [t for node in nodes for t in tree_leaves(value_of(node)) if isinstance(t, Tensor)]
    storages = [t.untyped_storage() for t in tensors if t.layout is torch.strided]
    return {storage_id(storage): int(storage.nbytes()) for storage in storages}


def _nodes(values: Any) -> list[Node]:
    return [value for value in values if isinstance(value, Node)]


def draws_numbers(node: Node) -> bool:
    """Whether the operation takes numbers from a generator.

    Torch 2.13 recomputes such operations at shares below 1, and its backward then draws other numbers than the forward
    did: wrong gradients, without a word (pytorch/pytorch#190758).
    """
    return node.op == "call_function" and hasattr(node.target, "tags") and draws(node.target, node.args, node.kwargs)
