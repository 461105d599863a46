"""Checkpointing by budget under `train.compile`: torch's own activation memory budget, at a value that fits.

That budget is a share, from 1 (what a compiled graph saves by default) to 0 (nothing but its inputs). It does not bound
bytes, and the peak may rise where it falls: at small values nearly everything is recomputed at once
(pytorch/pytorch#197838). So the values are tried on the graph that is being compiled, from the largest down. The
first that fits recomputes the least. What a split saves is known to the byte. Its peak, from how long each result
lives, is an estimate: compiled code never stores what lies between operations that it fuses, and may reorder them.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch.fx import GraphModule

from trainapp.techniques.graph_memory import Split, draws_numbers, measured, storages_of_inputs
from trainapp.torch_compiler import Halves, copy_of, keep, partitioner, split_at
from trainapp.units import bytes_text

SHARES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.0)
MARGIN = 1 / 8  # by which a peak is taken to be higher: estimates of a GPT were 11% too low to 13% too high
log = logging.getLogger(__name__)


class LossMemory(NamedTuple):
    """What a micro-batch needs besides the graph, in bytes: its batch, and what its loss adds to the outputs."""

    batch: int
    loss: int


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
        self._loss: LossMemory | None = None
        self._losses: dict[Any, LossMemory] = {}
        self._forward = 0
        self._warned: set[str] = set()

    @property
    def compile_options(self) -> dict[str, Any]:
        """Arguments for `torch.compile`. Every shape is compiled by itself, since each needs a share of its own."""
        return {"dynamic": False, "options": {"custom_partitioner_fn": partitioner(self.split)}}

    def loss_memory(self, key: Any) -> LossMemory | None:
        """The `loss` that `begin` was last given for this shape."""
        return self._losses.get(key)

    def begin(self, key: Any, limit: int | None, loss: LossMemory | None = None) -> None:
        """The coming forward is of batches of shape `key`.

        limit: bytes; None if not known, for torch's default. loss: given, the limit is for the peak of the
        micro-batch; None: for what is saved for backward.
        """
        before = self._shapes.get(key)
        if before is not None and limit is not None and limit < min(before.limit, before.needed):
            self.edition += 1
            self._shapes.clear()
        if loss is not None:
            self._losses[key] = loss
        self._key, self._limit, self._loss = key, limit, loss
        self._forward += 1

    def split(self, graph: GraphModule, inputs: Sequence[object], **options: Any) -> Halves:
        """Torch's partition of the graph, at the largest share that fits."""
        try:
            for node in graph.graph.nodes:
                if draws_numbers(node):
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
        fixed = storages_of_inputs(graph.graph, options.get("static_lifetime_input_indices") or ())
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
        if self._loss is None:
            return earlier + split.kept
        highest = max(split.forward, split.between + self._loss.loss, split.backward)
        total = self._loss.batch + earlier + highest
        return int(total * (1 + MARGIN))

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
            "" if self._loss is None else f"; its micro-batch takes up to about {bytes_text(needed)}",
        )

    def _warn(self, message: str, *values: Any) -> None:
        if message not in self._warned:
            self._warned.add(message)
            log.warning("activation_checkpointing=budget with train.compile=true: " + message, *values)
