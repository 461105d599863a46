"""Whether the limit leaves memory to a micro-batch."""

from trainapp.checkpoint.train_state import TrainState
from trainapp.errors import UserError
from trainapp.memory.device import DeviceMemory, static_bytes
from trainapp.techniques.catalogue import Situation, before_any_batch
from trainapp.units import bytes_text


def require_room(memory: DeviceMemory, state: TrainState, situation: Situation) -> None:
    """Raises UserError when the limit leaves no memory for any batch, however small. It names the techniques that
    save of what persists.
    """
    sizes = static_bytes(state.model, state.optimizers, state.average.averages, state.keeps_gradients)
    total = sum(sizes.values())
    if memory.limit is not None and total >= memory.limit:
        parts = ", ".join(f"{kind.label} {bytes_text(size)}" for kind, size in sizes.items() if size)
        techniques = before_any_batch(situation)
        lines = [f"  {own.pasted}: saves {own.saves}; cost: {own.costs}" for own in techniques]
        raise UserError(
            f"memory.limit={bytes_text(memory.limit)}: {parts} need {bytes_text(total)} before any batch; raise the "
            "limit, use a smaller model, or one of these:\n" + "\n".join(lines).replace("`", "") + "\n"
            "mode=plan behind the same command traces a step with each of them, also with several, and says which fit."
        )
