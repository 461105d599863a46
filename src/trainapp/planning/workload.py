"""What a step and an evaluation of a configuration take from the data: the sizes that a plan is for."""

from dataclasses import dataclass

from trainapp.assembly.components import Components
from trainapp.config import micro_schedule
from trainapp.config.schema import Config
from trainapp.data.stream_reader import at_most, is_stream
from trainapp.losses.losses import needs_whole_batch
from trainapp.losses.whole_batch import require_uncut


@dataclass(frozen=True)
class Workload:
    """Samples. share: of a step, on the rank with the most. all_eval_samples: of the largest evaluation set; none has a
    larger micro-batch. eval_samples: of the rank with the most of them. most_evaluated: at once. whole: whether a batch
    is never cut, and so has one size: it fits, or nothing does.
    """

    share: int
    all_eval_samples: int
    eval_samples: int
    most_evaluated: int
    whole: bool


def workload_of(config: Config, components: Components, world: int) -> Workload:
    """That of the configuration on so many ranks."""
    share = -(-at_most(config.batch.global_size, components.train_data) // world)
    evaluated = components.eval_data.values() if config.every.eval is not None else ()
    # A stream may have as many samples as fit.
    every = max((2 * share * world if is_stream(data) else len(data) for data in evaluated), default=0)
    own = -(-every // world)
    whole = needs_whole_batch(components.task)
    return Workload(share, every, own, min(share if whole else 2 * share, own), whole)


def require_uncut_batch(config: Config, components: Components, world: int) -> None:
    """Raises UserError where the configuration cuts a batch that its task needs as a whole."""
    if needs_whole_batch(components.task):
        require_uncut(config, world, at_most(config.batch.global_size, components.train_data))


def given_size(config: Config, share: int) -> int | None:
    """The micro-batch that the configuration fixes, if it does."""
    batch, parts = config.batch, config.accumulation.steps
    if batch.micro_schedule is not None:
        plans = [plan for _, plan in micro_schedule.entries(batch.micro_schedule)]
        largest = max(max(plan.values()) if isinstance(plan, dict) else plan for plan in plans)
        return min(largest, share)
    if parts != "auto":
        return -(-share // parts)
    return min(batch.micro_size, share) if isinstance(batch.micro_size, int) else None
