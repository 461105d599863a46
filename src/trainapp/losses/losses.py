"""The losses that come with the application: `task(model, batch) -> (loss_sum, count, metrics)`.

loss_sum is a sum over samples or tokens (a scalar tensor), and count their number or the sum of their weights (a
number, or a scalar tensor if padding determines it). The loop divides by the true count of the whole optimizer step, so
uneven micro-batches and padding are weighted correctly. metrics maps a name to a sum over the same count (a scalar
tensor or a number), to a pair of a sum and its own count, such as that of samples beside a loss of tokens, or to a
function that computes one of them, which is called only for logged steps and in evaluation. A metric that only some
micro-batches or ranks have is averaged over their count.

For stateful metrics, configured by `metrics.NAME`, `metrics` also holds the arguments of their `update`, under their
names or under EVERY for all of them: see `hooks/metrics.py`.
"""

import contextlib
import functools
import inspect
import numbers
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainapp.errors import UserError
from trainapp.hooks.metrics import EVERY
from trainapp.models.inspect import is_of_transformers
from trainapp.optim.precision import at_least_fp32
from trainapp.techniques.chunked_loss import features_only, linear_cross_entropy
from trainapp.tracking.scalars import MACHINE_SCALARS, STEP_SCALARS
from trainapp.units import listed

Metrics = Mapping[str, Any]  # sums: scalar tensors, numbers, or functions of no arguments; or arguments of an `update`
MetricSum = Tensor | tuple[Tensor, Tensor]  # a metric's sum, over the loss's count or over its own
Task = Callable[[nn.Module, Any], tuple[Tensor, "Tensor | float", Metrics]]

IGNORED = -100  # the target of padding
Output = int | str | None  # the part of a model's output that holds the predictions: see `part_of_output`


def classification(model: nn.Module, batch: Any, output: Output = None) -> tuple[Tensor, Tensor | int, Metrics]:
    """Cross-entropy of logits [B, classes] against int64 targets [B], or class probabilities [B, classes] in floating
    point; the metric is accuracy, for probabilities that of the largest.

    Also for pixels or other elements: logits [B, classes, ...], int64 targets [B, ...] with -100 for ignored elements,
    or probabilities [B, classes, ...]. The count is the number of elements. output: see `part_of_output`.
    """
    logits, targets = predictions(model, batch, output)
    loss_sum = _cross_entropy(logits, targets, "classification")

    # The metrics need classes; of probabilities, the likeliest.
    classes = targets
    if targets.is_floating_point():
        classes = targets.argmax(1)
    metrics = _metrics(logits, classes, 1)

    # Whole samples all count; elements, such as pixels, may be ignored.
    if classes.ndim < 2:
        return loss_sum, len(classes), metrics
    return loss_sum, (classes != IGNORED).sum(), metrics


def next_token(model: nn.Module, batch: Any, output: Output = None) -> tuple[Tensor, Tensor, Metrics]:
    """Cross-entropy of logits [B, T, vocabulary] against int64 targets [B, T], -100 for padding. output: see
    `part_of_output`.
    """
    logits, targets = predictions(model, batch, output)
    loss_sum = _cross_entropy(logits.flatten(0, 1), targets.flatten(), "next_token")
    count = (targets != IGNORED).sum()
    return loss_sum, count, _metrics(logits, targets, -1)


next_token.counts = "tokens"  # type: ignore[attr-defined]  # unit of its count, for the log's tokens per second


def _cross_entropy(logits: Tensor, targets: Tensor, task: str) -> Tensor:
    """Return the sum for logits [N, classes, ...]. Raises UserError for targets that are no class; GPUs assert them."""
    try:
        return F.cross_entropy(at_least_fp32(logits), targets, ignore_index=IGNORED, reduction="sum")
    except IndexError:
        _require_classes(targets, logits.shape[1], task)
        raise


def _require_classes(targets: Tensor, classes: int, task: str) -> None:
    """Raise UserError for a target that is neither a class nor ignored. Costs a pass: called after an error."""
    is_outside = (targets < 0) | (targets >= classes)
    wrong_targets = targets[is_outside & (targets != IGNORED)]
    if not len(wrong_targets):
        return

    target = int(wrong_targets[0])
    remedy = "correct the targets, or use a model with more classes"
    if target < 0:
        remedy = f"write {IGNORED} for what is ignored, in place of {target}, in the data set or its `collate`"
    raise UserError(
        f"task={task}: a target is {target}, but must be a class from 0 to {classes - 1}, or {IGNORED}, which is "
        f"ignored (torch's default `ignore_index`); {remedy}"
    )


def _metrics(logits: Tensor, targets: Tensor, dim: int) -> Metrics:
    """Return the accuracy, and `(logits, targets)` for each configured metric. dim: dimension of the classes."""
    return {
        "accuracy": lambda: (logits.argmax(dim) == targets).sum(),
        EVERY: lambda: (at_least_fp32(logits.detach()), targets),
    }


@dataclass(frozen=True)
class InChunks:
    """`classification` or `next_token` with logits for some rows at a time, for models with `features` and `head`: see
    techniques/chunked_loss.py.
    """

    unchecked: Task
    rows: int | Literal["auto"]

    def __call__(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor | int, Metrics]:
        inputs, targets = inputs_and_targets(batch)
        options = beside_inputs(model, batch)
        if targets.is_floating_point():
            raise UserError(
                f"memory.loss_chunk={self.rows}: the targets are class probabilities (as with mixup or cutmix), but "
                "the loss in chunks needs one class per sample; use memory.loss_chunk=null"
            )

        with features_only(model) as head:
            features = model(inputs, **options)
        try:
            loss_sum, correct = linear_cross_entropy(features, head, targets, self.rows, IGNORED)
        except RuntimeError as error:
            if "out of bounds" in str(error):
                _require_classes(targets, head.out_features, self.unchecked.__name__)
            raise

        count: Tensor | int = len(targets)
        if self.unchecked is not classification:
            count = (targets != IGNORED).sum()
        return loss_sum, count, {"accuracy": correct}


def unchecked(task: Any) -> Any:
    """Return the task of the configuration, without the checks around it or what computes its loss in chunks."""
    while hasattr(task, "unchecked"):
        task = task.unchecked
    return task


def attribute(task: Any, name: str) -> Any:
    """Return an attribute of a task (`whole_batch`, `counts`, `split`, `predict`, `embed`), or of the function in a
    `functools.partial`; None if neither has it.
    """
    owner = unchecked(task)
    while isinstance(owner, functools.partial) and not hasattr(owner, name):
        owner = owner.func
    return getattr(owner, name, None)


def is_built_in(task: Task) -> bool:
    """Return whether the task's loss is one of this module's."""
    return _function_of(task) in (classification, next_token)


def needs_no_check(task: Task, model: nn.Module) -> bool:
    """Return whether task and model are trainapp's own: samples never interact, and all outputs have them first."""
    return type(model).__module__.startswith("trainapp.models.") and is_built_in(task)


def can_be_chunked(task: Task) -> bool:
    """Return whether the loss can be computed in chunks: it is built in, and the model returns nothing but logits."""
    return unchecked(task) in (classification, next_token)


def class_dim(task: Any) -> int | None:
    """Return the dimension of the classes in a built-in task's logits; None for other tasks."""
    dim_by_task = {classification: 1, next_token: -1}
    return dim_by_task.get(_function_of(task))


def _function_of(task: Any) -> Any:
    """Return the function that a task is, with or without arguments; None for an object of a class."""
    function = unchecked(task)
    while isinstance(function, functools.partial):
        function = function.func
    return function if inspect.isfunction(function) else None


class CheckedTask:
    """A task whose results are checked: raises UserError for one that cannot be trained on or added up.

    Costs half a microsecond. The values of metrics are checked when they are added up: see `evaluate_metrics`.

    Attributes:
        unchecked: the task itself.
        setting: the setting that names the task, with its value, for messages.
        output: the part of the model's output that prediction and generation read, see `part_of_output`.
    """

    def __init__(self, task: Task, setting: str, output: Output = None):
        self.unchecked = task
        self.setting = setting
        self.output = output

    def __call__(self, model: nn.Module, batch: Any) -> tuple[Tensor, "Tensor | float", Metrics]:
        return self._checked(self.unchecked(model, batch))

    def embed(self, model: nn.Module, batch: Any) -> Any:
        """See `contrastive.EmbeddingTask`."""
        return attribute(self, "embed")(model, batch)

    def loss_of_embeddings(self, embeddings: Any) -> tuple[Tensor, "Tensor | float", Metrics]:
        """See `contrastive.EmbeddingTask`."""
        return self._checked(attribute(self, "loss_of_embeddings")(embeddings))

    def _checked(self, result: Any) -> tuple[Tensor, "Tensor | float", Metrics]:
        if not _is_addable(result):
            raise UserError(
                f"{self.setting}: must return (loss_sum, count, metrics): the sum of the micro-batch's losses, a real "
                "scalar tensor; the number of samples or tokens, or the sum of their weights, a number or a scalar "
                "tensor; and a dict of names and sums (numbers or scalar tensors), which may be empty. It returned "
                f"{form_of(result)}"
            )
        loss, count, metrics = result
        if not loss.requires_grad and torch.is_grad_enabled():
            refuse_without_gradient(self.setting)
        return loss, count, metrics


def in_chunks(task: CheckedTask, rows: int | Literal["auto"] | None) -> CheckedTask:
    """Return a built-in task with its loss in chunks of `rows` rows. Unchanged: other tasks, and all without rows."""
    if rows is None or not can_be_chunked(task):
        return task
    return CheckedTask(InChunks(task.unchecked, rows), task.setting)


def _is_addable(result: Any) -> bool:
    """Return whether a task's result has the right form."""
    if not isinstance(result, (tuple, list)) or len(result) != 3:
        return False
    loss, count, metrics = result
    if not isinstance(loss, Tensor) or loss.ndim or loss.is_complex():
        return False
    if not isinstance(metrics, (dict, Mapping)):
        return False
    if type(count) is int:  # mostly; the abstract class below takes longer
        return True
    if isinstance(count, (Tensor, np.ndarray)):
        return not count.ndim
    return isinstance(count, numbers.Real)


def form_of(value: Any) -> str:
    """Return types and shapes, for messages."""
    if isinstance(value, (Tensor, np.ndarray)):
        return f"{value.dtype}{list(value.shape)}"
    if isinstance(value, Mapping):
        texts = [f"{name!r}: {form_of(part)}" for name, part in value.items()]
        return "{" + ", ".join(texts) + "}"
    if isinstance(value, (tuple, list)) and len(value) < 10:
        forms = ", ".join(map(form_of, value))
        return f"({forms})" if isinstance(value, tuple) else f"[{forms}]"
    return type(value).__name__


def refuse_without_gradient(setting: str) -> NoReturn:
    """Raise UserError for a loss that depends on no trainable parameter."""
    raise UserError(
        f"{setting}: its loss requires no gradient, so nothing can be trained; it must depend on parameters of the "
        "model that are not frozen, without detach(), .item() or torch.no_grad() between (for a micro-batch that has "
        "nothing to learn from, return outputs.sum() * 0)"
    )


def compares_samples(task: Any) -> bool:
    """Return whether the task's loss is not a sum over samples: it is an embedding loss, or needs the whole batch."""
    return has_embeddings(task) or needs_whole_batch(task)


def has_embeddings(task: Any) -> bool:
    """Return whether the task defines an embedding loss, whose gradients are cached: `training.cached_gradients`."""
    return all(callable(attribute(task, name)) for name in ("embed", "loss_of_embeddings"))


def needs_whole_batch(task: Any) -> bool:
    """Return whether the task's batch is never split: it declares `whole_batch = True`, and has no embedding loss."""
    return bool(attribute(task, "whole_batch")) and not has_embeddings(task)


RESERVED = STEP_SCALARS | MACHINE_SCALARS  # names that a metric cannot have


def evaluate_metrics(metrics: Metrics, stateful: Collection[str] = ()) -> dict[str, MetricSum]:
    """Return the metrics' sums as scalar tensors, or as pairs of sum and count; metrics given as functions are called.

    Raises UserError for other values, and for a name that the log itself uses.

    Args:
        metrics: by name, as a task returns them.
        stateful: names of stateful metrics, for which `metrics` has no sum.
    """
    reserved = sorted(RESERVED & metrics.keys())
    if reserved:
        raise UserError(
            f"task: a metric cannot be called {reserved[0]}, which the log itself records; choose another name"
        )
    sums: dict[str, MetricSum] = {}
    with torch.no_grad():
        for name, value in metrics.items():
            if name == EVERY or name in stateful:
                continue
            if callable(value):
                value = value()

            # A sum over the loss's count, or a pair of a sum and its own count.
            if isinstance(value, tuple) and len(value) == 2:
                metric_sum, count = value
                sums[name] = (_metric_sum(name, metric_sum), _metric_sum(name, count))
            else:
                sums[name] = _metric_sum(name, value)
    return sums


def _metric_sum(name: str, value: Any) -> Tensor:
    """Return the value of a metric as a scalar tensor. Raises UserError if it is none."""
    tensor = value
    if not isinstance(value, Tensor):
        # Python's floats have 64 bits, which as_tensor would round to 32.
        dtype = torch.float64 if isinstance(value, float) else None
        with contextlib.suppress(TypeError, ValueError, RuntimeError):
            tensor = torch.as_tensor(value, dtype=dtype)
    if not isinstance(tensor, Tensor) or tensor.ndim:
        raise UserError(
            f"the task's metric {name} must be a number or a scalar tensor, the sum over the micro-batch, or a tuple "
            f"of this sum and its own count, but is {form_of(value)}; return its .sum(). No metrics.{name} is "
            "configured: if these are arguments of a metric with `update`, configure it, such as "
            f"'+metrics.{name}={{_target_: torchmetrics.F1Score, task: multiclass}}' (docs/metrics_and_callbacks.md)"
        )
    return tensor.detach()


# --- passing a batch to a model, and reading its output


def inputs_and_targets(batch: Any) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of a batch, see `part_of`. Raises UserError for one that lacks any of them."""
    inputs = part_of(batch, "inputs")
    targets = part_of(batch, "targets")
    if inputs is None or targets is None:
        missing = "inputs" if inputs is None else "targets"
        raise UserError(
            f"the batches have no {missing}, only {form_of(batch)}: this loss needs inputs and targets; use data that "
            "has both, or your own task"
        )
    return inputs, targets


def part_of(batch: Any, name: str) -> Any:
    """Return a batch's "inputs" or "targets", by key, by attribute, or as the first or second of a pair; None if it
    has none. A tensor holds only inputs.
    """
    if isinstance(batch, (dict, Mapping)):  # dict first: isinstance with an ABC takes 10 times as long
        return batch.get(name)
    if hasattr(batch, name):  # a dataclass; a namedtuple, in any order
        return getattr(batch, name)
    if isinstance(batch, (tuple, list)):
        position = {"inputs": 0, "targets": 1}[name]
        return batch[position] if position < len(batch) < 3 else None
    if isinstance(batch, Tensor) and name == "inputs":
        return batch
    return None


# Entries of a batch besides inputs and targets that models accept under these names, which are Transformers'.
BESIDE = ("attention_mask", "position_ids", "token_type_ids")


def beside_inputs(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    """Return the batch's attention mask and similar entries, by name.

    Raises UserError for a model that does not accept one of them: it would attend to padding, or across documents.
    """
    if not isinstance(batch, (dict, Mapping)):
        return {}
    options = {name: batch[name] for name in BESIDE if name in batch}
    if not options:
        return {}

    accepted_names = _keywords(type(model).forward)
    for name in options:
        if accepted_names is not None and name not in accepted_names:
            raise UserError(
                f"the batches have {name}, which the forward of {type(model).__name__} does not take; use a model that "
                "does, data without it (data.pack=false has no position_ids), or your own task"
            )
    return options


@functools.lru_cache(maxsize=64)
def _keywords(forward: Callable[..., Any]) -> frozenset[str] | None:
    """Return the names of a forward's parameters; None for `forward(self, *args, **kwargs)`, which accepts any.

    Next to named parameters, `**kwargs` are Transformers' options, which ignore unknown names.
    """
    signature = inspect.signature(forward)
    parameters = list(signature.parameters.values())[1:]  # without `self`
    names = [parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD]
    has_var_keyword = len(names) < len(parameters)
    passes_all_on = has_var_keyword and len(names) < 2
    if passes_all_on:
        return None
    return frozenset(names)


def predictions(model: nn.Module, batch: Any, output: Output = None) -> tuple[Tensor, Tensor]:
    """Return `(logits, targets)` of a batch.

    Raises UserError for a model that returns something else than one tensor of logits, unless `output` chooses a part
    of it: see `part_of_output`.
    """
    _, targets = inputs_and_targets(batch)
    returned = call_model(model, batch, output)
    lacks_logits = output is None and not isinstance(part_of_output(returned), Tensor)
    if lacks_logits and is_of_transformers(model):
        raise UserError(
            f"{type(model).__name__} returns no logits (only {', '.join(returned)}), which this loss needs; choose "
            "a model.task other than base, or your own task"
        )
    return tensor_of_output(returned, output, "this loss"), targets


def call_model(model: nn.Module, batch: Any, output: Output = None) -> Any:
    """Call the model with a batch's inputs, attention mask and the like, and return all that it returns.

    output: the part of it that has been chosen, if any. The model may then return a loss as well, and is given the
    targets where its forward has an optional parameter of that name: without them, nanoGPT returns the logits of the
    last position alone. Its loss is dropped, so class 0 stands there for ignored targets: models that compute a loss
    disagree on the number for them (minGPT's is -1), and fail with another one.
    """
    options = beside_inputs(model, batch)
    targets = part_of(batch, "targets")
    if output is not None and targets is not None and _takes_optional_targets(type(model).forward):
        has_classes = not (targets.is_floating_point() or targets.is_complex())
        if has_classes:
            targets = targets.clamp(min=0)
        options["targets"] = targets

    inputs = part_of(batch, "inputs")
    return model(inputs, **options)


@functools.lru_cache(maxsize=64)
def _takes_optional_targets(forward: Callable[..., Any]) -> bool:
    targets = inspect.signature(forward).parameters.get("targets")
    return targets is not None and targets.default is not targets.empty


def part_of_output(returned: Any, output: Output = None) -> Any:
    """Return the part of what a model returned that a setting `task.output` chooses: by its index in a tuple or list,
    its key in a dict, or the name of an attribute. Without the setting, the part `logits` if there is one, or all.

    A tensor is returned as it is: some models return more than that only in training mode. Raises UserError for a part
    that does not exist.
    """
    if isinstance(returned, Tensor):
        return returned

    # Without the setting: the logits, by key or attribute.
    if output is None and isinstance(returned, Mapping):
        return returned.get("logits", returned)
    if output is None:
        return getattr(returned, "logits", returned)

    # With it: that index, key or attribute.
    with contextlib.suppress(LookupError, TypeError):
        return returned[output]
    if isinstance(output, str) and hasattr(returned, output):
        return getattr(returned, output)
    names = listed(map(str, _parts(returned)))
    remedy = f"choose one of {names}" if names else "leave out task.output"
    raise UserError(f"task.output={output}: the model returns {form_of(returned)}, which has no such part; {remedy}")


def tensor_of_output(returned: Any, output: Output, reader: str) -> Tensor:
    """Return `part_of_output` if it is a tensor; raises UserError for anything else. reader: what needs the tensor, for
    the message.
    """
    part = part_of_output(returned, output)
    if isinstance(part, Tensor):
        return part

    tensors = [name for name, value in _parts(returned).items() if isinstance(value, Tensor)]
    remedy = "use another model"
    if tensors:
        remedy = f"choose it by its index or name, such as task.output={tensors[0]}"
    setting = "" if output is None else f"task.output={output}: "
    raise UserError(f"{setting}the model returns {form_of(returned)}, of which {reader} reads one tensor; {remedy}")


def _parts(returned: Any) -> dict[Any, Any]:
    """Return the parts of what a model returned, by what `task.output` may be."""
    if isinstance(returned, Mapping):
        return dict(returned)
    if isinstance(returned, (tuple, list)):
        return dict(enumerate(returned))
    if hasattr(returned, "__dict__"):
        return dict(vars(returned))
    return {}
