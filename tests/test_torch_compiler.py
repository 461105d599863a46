"""One test of each private part of torch's compiler that the program uses: it fails when torch changes that part."""

import pickle

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

from trainapp.torch_compiler import copy_of, keep, partitioner, split_at, value_of


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.5), nn.Linear(32, 8), nn.GELU())


def split_by(function, module, x):
    """Trace forward and backward, split by `function(graph, inputs, **options)`, run what that returns uncompiled."""
    from functorch.compile import aot_module, nop

    return aot_module(module, fw_compiler=nop, partition_fn=function)(x)


def joint_graph():
    """The graph of forward and backward, and what torch's partition takes besides it."""
    found = []

    def note(graph, inputs, **options):
        found.append((copy_of(graph), inputs, options))
        return split_at(1.0, graph, inputs, **options)

    split_by(note, model(), torch.randn(4, 8))
    return found[0]


def outputs_of(half):
    return {node.name for node in half.graph.output_node().args[0] if node is not None}


def test_a_copy_is_split_and_the_graph_is_not():
    graph, inputs, options = joint_graph()
    before = str(graph.graph)
    halves = split_at(0.5, copy_of(graph), inputs, **options)
    assert all(isinstance(half, GraphModule) for half in halves)
    assert str(graph.graph) == before


def test_the_budget_is_a_share_of_what_is_saved():
    graph, inputs, options = joint_graph()
    saved = []
    for share in (1.0, 0.0):
        forward, _ = split_at(share, copy_of(graph), inputs, **options)
        given = {node.name for node in forward.graph.nodes if node.op == "placeholder"}
        saved.append(outputs_of(forward) - given)
    assert len(saved[0]) > len(saved[1]) == options["num_fwd_outputs"]


def test_values_are_tensors_without_data():
    graph, *_ = joint_graph()
    shapes = [tuple(value_of(node).shape) for node in graph.graph.nodes if node.op == "placeholder"]
    assert (4, 8) in shapes


@pytest.mark.parametrize("keeps", [True, False])
def test_what_is_marked_is_saved(keeps):
    graph, inputs, options = joint_graph()
    (drawn,) = [node for node in graph.graph.nodes if "dropout.default" in str(node.target)]
    if keeps:
        keep(drawn)
    _, backward = split_at(0.05, copy_of(graph), inputs, **options)
    again = {node.name for node in backward.graph.nodes if node.op == "call_function"}
    assert (drawn.name in again) is not keeps


def test_the_class_is_what_inductor_takes():
    """It asserts the class, and reads `uuid()` for its cache: None is none."""
    from torch._inductor import config
    from torch._inductor.codecache import BypassFxGraphCache
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    own = partitioner(lambda graph, inputs, **options: (graph, inputs, options))
    assert isinstance(own, CustomPartitionerFn)
    assert own.uuid() is None
    assert own("graph", "inputs", compiler="inductor") == ("graph", "inputs", {"compiler": "inductor"})
    with config.patch(custom_partitioner_fn=own):
        assert config.custom_partitioner_fn is own
        assert config.get_config_copy()["custom_partitioner_fn"] is own
    with pytest.raises(BypassFxGraphCache):
        pickle.dumps(own)
