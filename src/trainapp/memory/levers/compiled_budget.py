"""Checkpointing by budget under `train.compile`: torch's own activation memory budget, at a value that fits.

That budget is a share, from 1 (what a compiled graph saves by default) to 0 (nothing but its inputs). It is no bound on
bytes, and the peak may rise where it falls: at small values nearly everything is recomputed at once
(pytorch/pytorch#197838). So the values are tried on the graph that is being compiled, from the largest down. The
first that fits recomputes the least. What a split saves is known to the byte. Its peak, from how long each result
lives, is an estimate: compiled code never stores what lies between operations that it fuses, and may reorder them.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from trainapp.memory.levers.block_trace import draws
from trainapp.torch_compiler import Halves, copy_of, keep, partitioner, split_at, value_of
from trainapp.torch_private import storage_id, tree_leaves
from trainapp.units import bytes_text

SHARES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.0)
MARGIN = 8  # a peak is taken to be higher by one in so many: estimates of a GPT were 11% too low to 13% too high
log = logging.getLogger(__name__)


class Beside(NamedTuple):
    """What a micro-batch needs besides the graph, in bytes: its batch, and what its loss adds to the outputs."""

    batch: int
    loss: int


class Split(NamedTuple):
    """A graph split at one share. Sizes are bytes, beside the graph's inputs.

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


class _Graph(NamedTuple):
    """A graph that was compiled in the forward of this number."""

    operations: int  # a hash of them
    forward: int
    kept: int


@dataclass
class _Shape:
    """The graphs that one shape of batches has been compiled into, and the most bytes that one of them needs."""

    limit: int
    needed: int = 0
    graphs: list[_Graph] = field(default_factory=list)


class CompiledBudget:
    """Chooses for every graph that is compiled what it saves for backward.

    Attribute `edition`: a number that compiled code must depend on. It changes where what was chosen no longer fits.
    """

    def __init__(self) -> None:
        self.edition = 0
        self._shapes: dict[Any, _Shape] = {}
        self._key: Any = None
        self._limit: int | None = None
        self._beside: Beside | None = None
        self._besides: dict[Any, Beside] = {}
        self._forward = 0
        self._warned: set[str] = set()

    @property
    def compile_options(self) -> dict[str, Any]:
        """Arguments for `torch.compile`. Every shape is compiled by itself, since each needs a share of its own."""
        return {"dynamic": False, "options": {"custom_partitioner_fn": partitioner(self.split)}}

    def beside(self, key: Any) -> Beside | None:
        """As the last micro-batch of this shape was begun with."""
        return self._besides.get(key)

    def begin(self, key: Any, limit: int | None, beside: Beside | None = None) -> None:
        """The coming forward is of batches of shape `key`.

        limit: bytes; None if not known, for torch's default. beside: given, the limit is for the peak of the
        micro-batch; None: for what is saved for backward.
        """
        before = self._shapes.get(key)
        if before is not None and limit is not None and limit < min(before.limit, before.needed):
            self.edition += 1
            self._shapes.clear()
        if beside is not None:
            self._besides[key] = beside
        self._key, self._limit, self._beside = key, limit, beside
        self._forward += 1

    def split(self, graph: GraphModule, inputs: Sequence[object], **options: Any) -> Halves:
        """Torch's partition of the graph, at the largest share that fits."""
        try:
            for node in graph.graph.nodes:
                if _draws(node):
                    keep(node)
            share = self._choose(graph, inputs, options)
        except Exception as error:  # whatever a graph of any kind raises when it is split or measured
            self._warn(
                "its compiled graph cannot be measured (%s: %s); it saves what torch.compile saves by default",
                type(error).__name__,
                (str(error).strip().splitlines() or [""])[0],
            )
            share = 1.0
        return split_at(share, graph, inputs, **options)

    def _choose(self, graph: GraphModule, inputs: Sequence[object], options: dict[str, Any]) -> float:
        if self._limit is None:
            self._warn("the loss cannot be traced; the compiled graph saves what torch.compile saves by default")
            return 1.0
        shape = self._shapes.setdefault(self._key, _Shape(self._limit))
        operations = hash(tuple((node.op, str(node.target)) for node in graph.graph.nodes))
        # Compiled once more, such as for another autocast: it takes the place of the graph that it was.
        shape.graphs = [g for g in shape.graphs if g.operations != operations or g.forward == self._forward]
        earlier = sum(own.kept for own in shape.graphs)
        is_first = all(own.forward < self._forward for own in shape.graphs)
        if not is_first:
            self._warn(
                "the model is compiled in several graphs, which share the budget in the order in which they run; one "
                "that runs more than once per forward counts once"
            )
        fixed = _inputs(graph.graph, options.get("static_lifetime_input_indices") or ())
        tried: list[tuple[int, Split]] = []
        for share in SHARES:
            halves = split_at(share, copy_of(graph), inputs, **options)
            split = measured(share, halves, options["num_fwd_outputs"], None if is_first else fixed)
            if not split.draws_again:
                tried.append((self._needed(earlier, split), split))
                if tried[-1][0] <= self._limit:
                    break
        needed, split = min(tried, key=lambda one: max(one[0], self._limit or 0))  # the first that fits, or the least
        shape.graphs.append(_Graph(operations, self._forward, split.kept))
        shape.needed = max(shape.needed, needed)
        self._report(needed, split, tried[0][1])
        return split.share

    def _needed(self, earlier: int, split: Split) -> int:
        if self._beside is None:
            return earlier + split.kept
        highest = max(split.forward, split.between + self._beside.loss, split.backward)
        total = self._beside.batch + earlier + highest
        return total + total // MARGIN

    def _report(self, needed: int, split: Split, default: Split) -> None:
        assert self._limit is not None
        if needed > self._limit:
            self._warn(
                "%s are left, but at every value of torch's budget the compiled graph needs more, at least %s; a "
                "smaller micro-batch needs less",
                bytes_text(max(0, self._limit)),
                bytes_text(needed),
            )
            return
        log.info(
            "activation checkpointing: the compiled graph saves %s of %s (activation_memory_budget=%g)%s",
            bytes_text(split.kept),
            bytes_text(default.kept),
            split.share,
            "" if self._beside is None else f"; its micro-batch takes up to about {bytes_text(needed)}",
        )

    def _warn(self, message: str, *values: Any) -> None:
        if message not in self._warned:
            self._warned.add(message)
            log.warning("activation_checkpointing=budget with train.compile=true: " + message, *values)


def measured(share: float, halves: Halves, outputs: int, given: set[int] | None = None) -> Split:
    """What a split keeps and needs. outputs: how many results of the forward half are not for its backward.

    given: the storages that exist anyway, such as those of parameters; None: those of all inputs, for a graph that is
    called with the batch itself. Operations are taken in their order in the graph.
    """
    forward, backward = halves[0].graph, halves[1].graph
    given = _inputs(forward) if given is None else given
    results: Any = forward.output_node().args[0]
    returned, saved = [_nodes(part) for part in (results[:outputs], results[outputs:])]
    kept = {key: size for key, size in _storages(saved).items() if key not in given}
    alone = {key: size for key, size in _storages(returned).items() if key not in given and key not in kept}
    names = {node.name for node in saved}
    gradients = [node for node in backward.nodes if node.op == "placeholder" and node.name not in names]
    drawn = {node.name for node in forward.nodes if _draws(node)}
    return Split(
        share,
        sum(kept.values()),
        _highest(forward, given),
        sum(kept.values()) + sum(alone.values()),
        _highest(backward, given, until_the_end=_storages(gradients)),  # autograd holds on to them
        any(_draws(node) and node.name in drawn for node in backward.nodes),
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


def _inputs(graph: Graph, places: Sequence[int] | None = None) -> set[int]:
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


def _draws(node: Node) -> bool:
    """Whether the operation takes numbers from a generator.

    Torch 2.13 recomputes such operations at shares below 1, and its backward then draws other numbers than the forward
    did: wrong gradients, without a word (pytorch/pytorch#190758).
    """
    return node.op == "call_function" and hasattr(node.target, "tags") and draws(node.target, node.args, node.kwargs)
