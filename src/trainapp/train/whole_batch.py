"""A task with `whole_batch = True`: its loss is no sum over samples, so that its batch is never cut."""

from trainapp.config.schema import Config
from trainapp.errors import UserError


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
    plans = (batch.micro_schedule or {}).values()
    if any(size < needed for plan in plans for size in (plan.values() if isinstance(plan, dict) else [plan])):
        raise UserError(f"batch.micro_schedule has sizes below {needed}, but {why}; leave it out")
    if not config.oom.keep_global_batch:
        raise UserError(
            f"oom.keep_global_batch=false: {why}, and so its samples stay, too; use oom.keep_global_batch=true, and "
            "choose batch.global_size yourself"
        )
