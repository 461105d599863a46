"""Which optimizers compute what trainapp's AdamW does. Imports no torch."""

from trainapp.config.schema import Optimizer

IN_FEWER_BITS = "trainapp.optim.low_precision.AdamW"
_ADAM = "torch.optim.Adam"


def is_adamw(optimizer: Optimizer) -> bool:
    """Whether the algorithm is AdamW, in any precision: also Adam's whose decay is not in the loss, or is 0. Not that
    of its relatives (NAdam, RAdam, Adamax) or with amsgrad, nor a class of the user's, of which only the name is known.
    """
    arguments = optimizer.arguments
    if optimizer.target not in (_ADAM, "torch.optim.AdamW", IN_FEWER_BITS) or arguments.get("amsgrad"):
        return False
    decays = [optimizer.weight_decay, *(group.get("weight_decay") or 0 for group in optimizer.groups)]
    return optimizer.target != _ADAM or not any(decays) or bool(arguments.get("decoupled_weight_decay"))
