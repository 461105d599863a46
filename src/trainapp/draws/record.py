"""The record of a run's draws: their layouts, and what depends on the micro-batch nevertheless."""

import contextlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

from trainapp.draws.layout import DrawLayout, RandomDraw
from trainapp.torch_private import outside_dispatch_modes

NUMBER_OF_DRAWS = "number of draws"  # the topic of a forward that draws a varying number of times
OWN_GENERATOR = "own generator"  # the topic of a forward that draws from a generator which the program does not seed
COLLATE = "draws of collate"  # the topic of data whose `collate` draws
EVALUATION = "evaluation"  # the work of an evaluation's forwards
PREDICTION = "prediction"  # that of `mode=predict`: the same forwards, unless the task predicts by itself
GLOBALS = "global variables"  # the topic under which a record notes those that a forward writes
ITERATORS = "iterators"  # the same for iterators from which a forward takes items


class TopicKind(Enum):
    """A kind of the topics in `DrawRecord.depends`. A topic is a key in checkpoints: the kind's value, then a name."""

    DRAWS = "draws of "  # draws with unknown samples, of an operation or of all in a work
    PADDING = "padding of "  # a task whose results depend on the padding
    SUM = "sum of "  # a task whose loss adds up less exactly than rounding explains
    LATER_SUM = "later sum of "  # a task that the check before the first step has passed, and that is no sum later
    GRADIENTS = "gradients of "  # a task whose gradients do not add up, though its loss does

    def topic(self, name: str) -> str:
        """Return the topic of this kind with the name."""
        return f"{self.value}{name}"

    def includes(self, topic: str) -> bool:
        """Return whether the topic is of this kind."""
        return topic.startswith(self.value)


def shown_name(kernel: str) -> str:
    """Return the name by which users know an operation: `torch.randint` of `random_.from`, `bernoulli_` of
    `bernoulli_.float`.
    """
    name = kernel.partition(".")[0]  # without its overload
    return "torch.randint" if name == "random_" else name


@dataclass
class DrawRecord:
    """What is known of the draws in a run's forwards."""

    # By work (an update, or evaluation), then by the number of the draw. Negative numbers: `SampleDraws.layout_of`.
    layouts: dict[str, dict[int, DrawLayout]] = field(default_factory=dict)
    # What depends on the micro-batch, by topic, in words.
    depends: dict[str, str] = field(default_factory=dict)
    # Whether anything was drawn.
    draws: bool = False
    # Works of tasks and models that are trainapp's own: all their draws have the samples first. Not in checkpoints.
    samples_come_first: set[str] = field(default_factory=set)
    # The names of modules that draw the same for all samples, by operation. Not in checkpoints: unknown after a resume.
    modules_of_shared: dict[str, set[str]] = field(default_factory=dict)
    # Paths in embedding losses of the BatchNorm layers that `embed` calls, which see a micro-batch: those that
    # `loss_of_embeddings` calls see the whole step. Not in checkpoints.
    batchnorms_of_embed: set[str] = field(default_factory=set)

    def state_dict(self) -> dict[str, Any]:
        """Return plain values, for a checkpoint: a resumed run draws as it would have."""
        plain_layouts = {}
        for work, layouts in self.layouts.items():
            plain_layouts[work] = {number: list(layout) for number, layout in layouts.items()}
        return {"places": plain_layouts, "depends": self.depends, "draws": self.draws}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` has returned. What this process has noted stays, too."""
        self.layouts = {}
        for work, plain_layouts in state["places"].items():
            self.layouts[work] = {number: DrawLayout(*fields) for number, fields in plain_layouts.items()}
        self.depends = state["depends"] | self.depends
        self.draws = state["draws"]

    def note(self, topic: str, text: str) -> None:
        """Note once what depends on the micro-batch."""
        self.depends.setdefault(topic, text)

    def layout_of(self, work: str, number: int, draw: RandomDraw, samples: int) -> DrawLayout:
        """Return the layout of a draw in this work.

        Where nothing was learnt of the work, the first dimension has the samples if its size is their number; if that
        of another dimension is, too, this is noted as a guess. A draw
        that differs from the one learnt is noted, for the number of draws then depends on the batch; it takes the axis
        of another draw that it fits.
        """
        kernel = draw.kernel
        dimensions = len(draw.shape)

        if draw.shape == () and not kernel.startswith("randperm"):  # a scalar: shared by all samples
            return DrawLayout(kernel, dimensions)

        # Of a work that was never tried, only the shape is known.
        layouts = self.layouts.get(work)
        if layouts is None:
            learnt = self.layouts.get(EVALUATION, {}) if work == PREDICTION else {}
            if number in learnt and learnt[number].fits(draw, samples):
                return learnt[number]
            if draw.shape[:1] == (samples,):
                if work not in self.samples_come_first:
                    self._note_if_ambiguous(draw, samples)
                return DrawLayout(kernel, dimensions, axis=0)
            return DrawLayout(kernel, dimensions, varies=True)

        # Nearly always the draw is the one that was learnt.
        if number in layouts and layouts[number].fits(draw, samples):
            return layouts[number]

        # Otherwise another one with its shape tells where the samples are.
        if number >= 0:
            order = "the forward draws in another order, or another number of times, than before the first step"
            text = f"{shown_name(kernel)} of {list(draw.shape)}: {order}, and later draws follow it"
            self.note(NUMBER_OF_DRAWS, text)
        for layout in layouts.values():
            if layout.axis is not None and layout.fits_shape(draw.shape, samples):
                return layout._replace(kernel=kernel)
        return DrawLayout(kernel, dimensions, varies=True)

    def _note_if_ambiguous(self, draw: RandomDraw, samples: int) -> None:
        """Note a draw of which several dimensions may have the samples. Those of a single one are its own in any."""
        if samples > 1 and draw.shape.count(samples) > 1:
            text = (
                f"{shown_name(draw.kernel)} of {list(draw.shape)}: several of its dimensions are as long as the "
                "micro-batch, which of them has the samples could not be learnt before the first step, and the first "
                "counts as theirs"
            )
            self.note(TopicKind.DRAWS.topic(draw.kernel), text)


@contextlib.contextmanager
def noted_draws(
    draw_record: DrawRecord,
    device: torch.device,
    draws_by_sample: bool,
    micro_batch_context: contextlib.AbstractContextManager[Any],
) -> Iterator[None]:
    """Note whether the block, inside of `micro_batch_context`, draws from torch's generators: by sample, only kernels
    that use the device's by themselves do so, such as flash-attn's dropout. Takes 20 microseconds.
    """
    # By sample, the CPU's generator counts the draws, see `SampleDraws`.
    devices = {device.type} if draws_by_sample else {"cpu", device.type}
    states_before = _generator_states(device, devices)
    with micro_batch_context:
        yield
    states_after = _generator_states(device, devices)
    with outside_dispatch_modes():
        has_drawn = not all(map(torch.equal, states_before, states_after))
    if draws_by_sample and has_drawn:
        draw_record.note(
            TopicKind.DRAWS.topic("kernels"),
            f"a kernel draws from the generator of {device} by itself, not by torch's operations: its numbers belong "
            "to the micro-batch, not to the samples",
        )
    draw_record.draws = draw_record.draws or has_drawn


def _generator_states(device: torch.device, device_types: Collection[str]) -> list[torch.Tensor]:
    states = []
    with outside_dispatch_modes():  # a fake tensor would not hold the state
        if "cpu" in device_types:
            states.append(torch.default_generator.get_state())
        if "cuda" in device_types:
            states.append(torch.cuda.get_rng_state(device))
    return states
