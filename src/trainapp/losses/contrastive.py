"""Losses that compare the samples of their batch and are therefore not sums over samples. The batch of a task with
`whole_batch = True` is never split. That of a task with `embed(model, batch)` and `loss_of_embeddings(embeddings)` is:
gradients for embeddings can be cached (`training.cached_gradients`).

Embeddings are a tensor, or a tuple, list, dict or dataclass of tensors, whose first dimension is the samples. Those of
several micro-batches are concatenated in it, so the loss sees the same structure with more rows.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainapp.config.schema import Batch, Config
from trainapp.data.batch import map_tensors, tensors_in
from trainapp.errors import UserError, add_note
from trainapp.losses.losses import Metrics, Output, inputs_and_targets, tensor_of_output
from trainapp.optim.precision import at_least_fp32


class EmbeddingTask:
    """The base of tasks whose loss compares the embeddings of a whole batch; see `training.cached_gradients`.

    A derived class defines `embed` and `loss_of_embeddings`. A task without this base needs these and `__call__`.
    """

    def embed(self, model: nn.Module, batch: Any) -> Any:
        """Return the embeddings of the samples: a tensor, or a tuple or dict of tensors, of shapes [samples, ...].

        It must not compare samples, and is called twice per micro-batch.
        """
        raise NotImplementedError

    def loss_of_embeddings(self, embeddings: Any) -> tuple[Tensor, Tensor | float, Metrics]:
        """Return (loss_sum, count, metrics), as any task, for the embeddings of all samples of the step."""
        raise NotImplementedError

    def __call__(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor | float, Metrics]:
        return self.loss_of_embeddings(self.embed(model, batch))


class Contrastive(EmbeddingTask):
    """The symmetric cross-entropy of InfoNCE between two views of each sample (in CLIP: an image and its text).

    Inputs are [B, 2, ...], two views per sample, such as those of `data.sets.digits.DigitPairs`. The model's outputs
    are the embeddings, of any shape: they are flattened and normalised. The metric is the accuracy of matching the
    first view to the second.

    Needs memory for logits [N, N], for the N samples of a step on all ranks. Raises UserError for inputs without two
    views.

    Args:
        temperature: divides the cosines.
        output: the part of what the model returns, see `losses.part_of_output`.

    Sources: van den Oord et al. 2018, arXiv:1807.03748; Chen et al. 2020 (SimCLR), arXiv:2002.05709; Radford et al.
    2021 (CLIP), arXiv:2103.00020.
    """

    def __init__(self, temperature: float = 0.1, output: Output = None):
        self.temperature = temperature
        self.output = output

    def embed(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """Return the embeddings of both views, each [B, features] in fp32, or in fp64 of a model in fp64."""
        inputs, _ = inputs_and_targets(batch)
        if inputs.ndim < 3 or inputs.shape[1] != 2:
            raise UserError(
                f"task=contrastive: needs inputs of shape [samples, 2, ...], two views of each sample, but they have "
                f"{list(inputs.shape)}; data._target_=trainapp.data.sets.digits.DigitPairs has them"
            )
        embeddings = tensor_of_output(model(inputs.flatten(0, 1)), self.output, "this loss")
        features = at_least_fp32(embeddings.flatten(1))
        views = F.normalize(features, dim=1).unflatten(0, (-1, 2))  # [B, 2, features]
        first, second = views.unbind(1)
        return first, second

    def loss_of_embeddings(self, embeddings: tuple[Tensor, Tensor]) -> tuple[Tensor, int, Metrics]:
        """Return the loss as the mean of both directions, with the number of samples and the accuracy."""
        first, second = embeddings
        logits = first @ second.T / self.temperature  # row i: the first view of sample i, compared to all second views
        matches = torch.arange(len(logits), device=logits.device)

        # A classification in both directions: of the second view by the first, and the reverse.
        wide_logits = at_least_fp32(logits)
        to_second = F.cross_entropy(wide_logits, matches, reduction="sum")
        to_first = F.cross_entropy(wide_logits.T, matches, reduction="sum")
        loss_sum = (to_second + to_first) / 2

        correct = (logits.argmax(1) == matches).sum()
        return loss_sum, len(logits), {"accuracy": correct}


# --- embeddings


def embed(task: Any, model: nn.Module, batch: Any, samples: int | None = None) -> Any:
    """Return the result of the task's `embed` for a batch. Raises UserError for results that cannot be joined.

    Args:
        task: the task.
        model: the model.
        batch: the batch; the task gets copies of its containers, which it may modify.
        samples: number of samples in the batch, if known.
    """
    batch_copy = map_tensors(lambda tensor: tensor, batch)
    embeddings = task.embed(model, batch_copy)

    # All tensors must have a row per sample.
    shapes = [list(tensor.shape) for tensor in tensors_in(embeddings)]
    row_counts = {shape[0] for shape in shapes if shape}
    has_scalars = [] in shapes
    has_other_count = samples is not None and row_counts != {samples}
    if has_scalars or len(row_counts) != 1 or has_other_count:
        raise UserError(
            f"{task.setting}: its embed must return a tensor, or a tuple or dict of tensors, whose first dimension is "
            f"the samples, {samples or 'equally many in each'}, but returned a {type(embeddings).__name__} with "
            f"tensors of shapes {shapes} (several views of a sample go into a second dimension, or into tensors of "
            "their own)"
        )
    return embeddings


def join(parts: list[list[Tensor]], setting: str) -> list[Tensor]:
    """Return the concatenated tensors of several micro-batches. Raises UserError if they do not fit.

    Args:
        parts: the tensors of each micro-batch.
        setting: the setting that names the task, with its value, for the message.
    """
    if len(parts) == 1:
        return list(parts[0])
    try:
        return [torch.cat(tensors) for tensors in zip(*parts, strict=True)]
    except (RuntimeError, ValueError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise UserError(
            f"{setting}: the embeddings of two micro-batches cannot be joined ({error}); return the same structure "
            "for each, with rows whose shape does not depend on the batch, such as on its padding"
        ) from error


def like(structure: Any, tensors: list[Tensor]) -> Any:
    """Return a structure like the result of `embed`, with these tensors."""
    remaining = iter(tensors)
    return map_tensors(lambda _: next(remaining), structure)


def explain_in_place_write(error: RuntimeError, setting: str) -> None:
    """Add a note to torch's error about a `loss_of_embeddings` that changes embeddings in place. Its message tells, as
    torch has no error class for it (2.13).
    """
    if "a leaf Variable that requires grad" in str(error):
        add_note(
            error,
            f"{setting}: its loss_of_embeddings changes embeddings in place, but the step computes gradients for them: "
            "make new tensors, such as `first = first / 2`, or `first = first.clone()` before",
        )


def require_uncut(config: Config, world_size: int, samples: int) -> None:
    """Raise UserError for settings that would split the batch of a task with `whole_batch = True`.

    Args:
        config: the configuration.
        world_size: number of ranks.
        samples: number of samples in the data set; 0 if unknown.
    """
    whole_size = config.batch.global_size
    if samples:
        whole_size = min(whole_size, samples)
    why = f"task={config.task} has whole_batch=True: its batch is never split"
    if world_size > 1:
        raise UserError(
            f"{why}, but {world_size} ranks would each compute the loss of a part of it, which is another loss; use "
            "parallel=single, a loss that is a sum over samples, or an embedding loss (trainapp.tasks.EmbeddingTask)"
        )
    is_accumulated = config.accumulation.steps not in ("auto", 1)
    is_split = any(size < whole_size for size in _micro_sizes(config.batch))
    if is_accumulated or is_split:
        raise UserError(
            f"{why}; remove batch.micro_size, batch.micro_schedule and accumulation.steps, which would split it; use "
            "batch.global_size for the number of samples that the loss compares"
        )


def _micro_sizes(batch: Batch) -> list[Any]:
    """Return all micro-batch sizes that the settings name: of every step, update and shape of the schedule, and
    `batch.micro_size`.
    """
    sizes: list[Any] = []
    for schedule in batch.schedules.values():
        for size_or_sizes in schedule.values():
            if isinstance(size_or_sizes, dict):  # by shape
                sizes.extend(size_or_sizes.values())
            else:
                sizes.append(size_or_sizes)
    if batch.micro_size != "auto":
        sizes.append(batch.micro_size)
    return sizes
