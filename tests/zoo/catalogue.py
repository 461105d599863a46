"""Every cell of the zoo: which model, data set and loss go together."""

import importlib
import types
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch


class Cell(NamedTuple):
    """Dotted names below this package, and what is special.

    resumes: whether a checkpoint can hold all of its state. sums: whether an evaluation is the sum over its samples,
    whatever batches they come in. exact: whether its evaluations are repeated bit for bit on every processor: on some,
    MKL's products depend on where few rows lie in memory. ranks: whether DDP takes the model as it is. metric: a class,
    of which evaluations have an instance called "own". updates: (name, task, parameters) of several optimizers; `task`
    is what is evaluated. changes: settings, as for `harness.configure`.
    """

    model: str
    data: str = "data.Vectors"
    task: str = "losses.classify"
    resumes: bool = True
    sums: bool = True
    exact: bool = True
    ranks: bool = True
    metric: str | None = None
    updates: tuple[tuple[str, str, str], ...] = ()
    changes: tuple[tuple[str, Any], ...] = ()


MODELS = {
    "moco": Cell("teachers.MoCo", task="losses.own", sums=False),
    "mean teacher through data": Cell("teachers.MeanTeacher", task="losses.own"),
    "hidden teacher": Cell("teachers.HiddenTeacher", task="losses.own"),
    "unit weights": Cell("teachers.UnitWeights"),
    "replaced parameter": Cell("teachers.ReplacedParameter"),
    "actnorm": Cell("teachers.ActNorm"),
    "batchnorm": Cell("buffers.BatchNorm"),
    "spectral norm": Cell("buffers.SpectralNorm"),
    "lazy buffer": Cell("buffers.LazyStatistics", resumes=False),  # what a forward registers is in no checkpoint
    "re-assigned buffer": Cell("buffers.Reassigned"),
    "buffer through numpy": Cell("buffers.WrittenThroughNumPy"),
    "writes in evaluation": Cell("buffers.WritesInEvaluation", sums=False),
    "own generators": Cell("chance.OwnGenerators"),
    "mixup": Cell("chance.Mixup"),
    "gumbel": Cell("chance.Gumbel", task="losses.own", sums=False),
    "counter": Cell("chance.Counter", resumes=False),  # nor are plain attributes
    "queue": Cell("chance.Queue"),
    "lstm": Cell("structures.LSTM", "data.Tokens"),
    "transformer": Cell("structures.Transformer", "data.Tokens"),
    "tied weights": Cell("structures.TiedLanguageModel", "data.Tokens", "losses.next_token"),
    "recomputing": Cell("structures.Recomputing"),
    "complex": Cell("structures.Complex", ranks=False),  # gloo reduces none
    "hooked": Cell("structures.Hooked"),
    "gradient penalty": Cell("structures.GradientPenalty", task="losses.own"),
    "unused branch": Cell("structures.NestedLists", ranks=False),
}

if find_spec("peft") is not None:  # an extra
    lora = (("adapter.kind", "lora"), ("adapter.dropout", 0.1))
    MODELS |= {
        "llama with lora": Cell("llamas.llama", "data.Tokens", "losses.next_token_of_outputs", changes=lora),
        "packed documents": Cell("llamas.llama", "llamas.PackedTokens", "losses.next_token_of_outputs"),
    }

BATCHES = {
    "dict": Cell("batches.Linear", task="batches.of_dict"),
    "tuple": Cell("batches.Linear", "batches.Tuples", "batches.of_sequence"),
    "square time first": Cell("batches.Linear", "batches.SquareTimeFirst", "batches.of_time_first"),
    "packed": Cell("batches.Bag", "batches.Packed", "batches.of_packed"),
    "table": Cell("batches.Linear", "batches.WithTable", "batches.of_table"),
    "strings": Cell("batches.Linear", "batches.Strings", "batches.of_strings"),
    "graphs": Cell("batches.GraphNetwork", "batches.Graphs", "batches.of_graphs", exact=False),
    "ragged": Cell("batches.Padded", "batches.Ragged", "batches.of_dict"),
    "sample weights": Cell("batches.Linear", "batches.SampleWeights", "batches.of_sample_weights"),
}

STATEFUL = {
    "running scale": Cell("buffers.BatchNorm", task="stateful.running_scale"),
    "module as loss": Cell("batches.Linear", task="stateful.centre"),
    "random smoothing": Cell("batches.Linear", task="stateful.random_smoothing"),
    "noisy data": Cell("batches.Linear", "stateful.NoisyVectors"),
    "replay": Cell("batches.Linear", "stateful.Replay"),
    "stateful metric": Cell("batches.Linear", task="losses.classify_passing", metric="stateful.Deviation"),
    "stream": Cell("batches.Linear", "stateful.StreamWithState"),
    "stream without state": Cell("batches.Linear", "stateful.Stream"),
}

SEVERAL_OPTIMIZERS = {
    "gan": Cell(
        "gans.GAN",
        task="gans.distance",
        sums=False,
        updates=(
            ("discriminator", "gans.discriminate", "discriminator"),
            ("generator", "gans.generate", "generator"),
        ),
    ),
}

WHOLE_BATCH = {
    "embeddings": Cell("embedded.Encoder", task="embedded.matching"),
}

ALL = MODELS | BATCHES | STATEFUL | SEVERAL_OPTIMIZERS | WHOLE_BATCH


def find(name):
    """What a dotted name below this package refers to."""
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(f"{__package__}.{module}"), attribute)


def as_in_a_new_process(cell):
    """Objects that `task` names live as long as the process: make this cell's anew."""
    module, _, attribute = cell.task.rpartition(".")
    task = find(cell.task)
    if isinstance(task, types.FunctionType):
        return
    with torch.random.fork_rng():
        setattr(importlib.import_module(f"{__package__}.{module}"), attribute, type(task)())
