"""A task with `whole_batch = True`: its loss is no sum over samples. So its batch is never cut, unless the task offers
embeddings, for which gradients are cached (`cached_gradients`).
"""

from typing import Any

from trainapp.config.schema import Config
from trainapp.errors import UserError
from trainapp.losses.losses import EMBEDDING_METHODS, attribute, compares_samples, has_embeddings


def require_complete(task: Any, setting: str) -> None:
    """Raises UserError for a task that offers a part of what gradient caching needs. setting: with its value."""
    if task is None:
        return
    own = [name for name in EMBEDDING_METHODS if callable(attribute(task, name))]
    if len(own) == 1:
        lacking = next(name for name in EMBEDDING_METHODS if name not in own)
        raise UserError(
            f"{setting}: the task has {own[0]} but no {lacking}; gradient caching needs `embed(model, batch)` and "
            "`loss_of_embeddings(embeddings)` (trainapp.tasks.EmbeddingTask has them)"
        )
    if own and not compares_samples(task):
        raise UserError(
            f"{setting}: the task has embed and loss_of_embeddings, but not `whole_batch = True`, without which its "
            "loss would be taken for a sum over samples; set it on the task"
        )


def require_same_batch(config: Config, *tasks: Any) -> None:
    """Raises UserError for a loss of embeddings whose samples would become fewer: it would be another loss."""
    if any(map(has_embeddings, tasks)) and not config.oom.keep_global_batch:
        raise UserError(
            f"oom.keep_global_batch=false: task={config.task} compares the samples of its batch (whole_batch=True), "
            "which would become fewer; use oom.keep_global_batch=true: the micro-batch is free, since gradients are "
            "cached"
        )


def require_uncut(config: Config, world: int, samples: int) -> None:
    """For a run of such a task. Raises UserError for settings that would cut its batch.

    world: ranks. samples: in the data set; 0 where that is unknown.
    """
    batch = config.batch
    needed = min(batch.global_size, samples or batch.global_size)
    why = f"task={config.task} has whole_batch=True: its batch is never cut"
    if world > 1:
        raise UserError(
            f"{why}, but {world} ranks would each compute the loss of a part of it, which is another loss; use "
            "parallel=single, or a loss that is a sum over samples"
        )
    if batch.micro_size == "plan" or (batch.micro_size != "auto" and batch.micro_size < needed):
        raise UserError(
            f"batch.micro_size={batch.micro_size}: {why}; use batch.micro_size=auto, and batch.global_size for the "
            "samples that the loss compares"
        )
    if config.accumulation.steps not in ("auto", 1):
        raise UserError(f"accumulation.steps={config.accumulation.steps}: {why}; use accumulation=auto")
    plans = [plan for own in batch.schedules.values() for plan in own.values()]
    if any(size < needed for plan in plans for size in (plan.values() if isinstance(plan, dict) else [plan])):
        raise UserError(f"batch.micro_schedule has sizes below {needed}, but {why}; leave it out")
    if not config.oom.keep_global_batch:
        raise UserError(
            f"oom.keep_global_batch=false: {why}, and so its samples stay, too; use oom.keep_global_batch=true, and "
            "choose batch.global_size yourself"
        )
