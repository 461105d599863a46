"""Products in 8 bits, in the list of levers because they are asked for: they save time rather than memory."""

from trainapp.config.schema import Config
from trainapp.optim.quantized_products import Kind
from trainapp.techniques.conditions import needs_linear_layers
from trainapp.techniques.lever import Lever


def _products(kind: Kind, bits: str, devices: str) -> Lever:
    def in_force(config: Config) -> bool:
        return config.precision.mode == kind

    return Lever(
        f"precision={kind}",
        saves="time, no memory: weights, gradients, state and activations are those of `bf16`",
        costs=f"only {bits} and a scale per row remain in products of linear layers, but for the weight's gradient",
        applies=f"torchao; {devices}; models with `blocks()` that have linear layers; worth it with `train.compile`",
        in_force=in_force,
        require=needs_linear_layers,
        result="rounded",
    )


PRODUCTS = (
    _products("int8", "8 bits", "CUDA (on the CPU slower than `bf16`)"),
    _products("fp8", "4 bits of precision", "CUDA from compute capability 8.9 on (on the CPU slower than `bf16`)"),
)
