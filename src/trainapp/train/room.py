"""Whether the limit leaves memory to a micro-batch."""

import shlex

from trainapp.checkpoint.train_state import TrainState
from trainapp.errors import UserError
from trainapp.memory.device import DeviceMemory, static_bytes
from trainapp.techniques import catalogue
from trainapp.techniques.lever import Lever, Situation, overrides_of
from trainapp.units import bytes_text


def require_room(memory: DeviceMemory, state: TrainState, situation: Situation) -> None:
    """Raises UserError when the limit leaves no memory for any batch, however small. It names the levers that help,
    those first that save enough to leave some.
    """
    sizes = static_bytes(state.model, state.optimizers, state.average.averages, state.keeps_gradients)
    total = sum(sizes.values())
    if memory.limit is not None and total >= memory.limit:
        parts = ", ".join(f"{kind.label} {bytes_text(size)}" for kind, size in sizes.items() if size)
        excess = total - memory.limit
        levers = catalogue.of_state(situation, sizes)
        levers.sort(key=lambda saving: 1 if saving[0] is None else 0 if saving[0] > excess else 2)
        lines = [
            f"  {_pasted(lever, situation)}: saves {_saving(saved, lever, excess)}; cost: {lever.costs}"
            for saved, lever in levers
        ]
        raise UserError(
            f"memory.limit={bytes_text(memory.limit)}: {parts} need {bytes_text(total)} before any batch; raise the "
            "limit, use a smaller model, or one of these:\n" + "\n".join(lines).replace("`", "") + "\n"
            "mode=plan behind the same command traces a step with each of them, also with several, and says which fit."
        )


def _saving(saved: int | None, lever: Lever, excess: int) -> str:
    if saved is None:
        return lever.saves
    if saved <= excess:
        return f"{bytes_text(saved)}, which may not be enough"
    return f"{bytes_text(saved)}, which leaves at least {bytes_text(saved - excess)} for a batch"


def _pasted(lever: Lever, situation: Situation) -> str:
    """Its overrides; its setting where the value is the user's to choose."""
    return shlex.join(overrides_of([lever])) if lever.changes else lever.setting
