"""The private or undocumented parts of torch's compiler that the program uses, each with its reason.

Used on torch 2.13; `tests/test_torch_compiler.py` tests each of them. Imported late: the compiler takes a second.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

Halves = tuple[GraphModule, GraphModule]  # what runs forward, and what runs backward


def partitioner(function: Callable[..., Halves]) -> Any:
    """For `torch.compile(options={"custom_partitioner_fn": ...})`: calls `function(graph, inputs, **options)` for every
    graph that is compiled with its backward.

    A private class, since inductor takes no other (torch 2.13, _inductor/compile_fx.py, `partition_fn`). Here the joint
    graph of forward and backward is at hand; the documented `torch._functorch.config.activation_memory_budget` needs a
    number before there is one.
    """
    from torch._inductor.codecache import BypassFxGraphCache
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    class Partitioner(CustomPartitionerFn):
        def __call__(self, gm: GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Halves:
            return function(gm, joint_inputs, **kwargs)

        def uuid(self) -> None:
            """No cache on disk: what another run has chosen may not fit."""

        def __deepcopy__(self, memo: Any) -> "Partitioner":
            """Inductor copies its settings."""
            return self

        def __reduce__(self) -> Any:
            """For the key of that cache, which is made all the same."""
            raise BypassFxGraphCache("what is saved for backward depends on the run's memory")

    return Partitioner()


def split_at(share: float, graph: GraphModule, inputs: Sequence[object], **options: Any) -> Halves:
    """The graph as torch splits it with this activation memory budget, between 0 and 1. Changes `graph`.

    By the partition that `functorch.compile` documents, from where it has types.
    """
    from torch._functorch import config
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    with config.patch(activation_memory_budget=share):
        halves: Halves = min_cut_rematerialization_partition(graph, inputs, **options)
    return halves


def copy_of(graph: GraphModule) -> GraphModule:
    """A copy to try a split on. Both have the same tensors in `node.meta`."""
    return GraphModule(graph, copy.deepcopy(graph.graph))


def value_of(node: Node) -> Any:
    """What the node computes: tensors without data. None where the graph does not say."""
    return node.meta.get("val")


def keep(node: Node) -> None:
    """Have the result of this node saved for backward, whatever the budget.

    As torch's own passes and selective checkpointing mark a node (torch 2.13, _functorch/partitioners.py).
    """
    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
