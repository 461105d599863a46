"""What a language model of Transformers must not see: later tokens, and packed documents before its own."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from trainapp.errors import UserError
from trainapp.rng import preserved_rng
from trainapp.torch_private import is_tracing


@torch.no_grad()
def require_causal(model: nn.Module) -> None:
    """Raises UserError for a model whose predictions depend on the tokens that they are to predict, such as BERT as
    a decoder without `is_decoder`, and XLNet: it would train to read the answers.

    Compares two short texts of which the later tokens differ. A trace has no values to compare, nor what fails here:
    the first step reports that.
    """
    parameter = next(model.parameters())
    if is_tracing() or parameter.is_meta:
        return
    was_training, device = model.training, parameter.device
    model.eval()
    try:
        with preserved_rng(device):
            one, other = (torch.tensor([tokens], device=device) for tokens in ([0, 1, 2, 3], [0, 1, 3, 0]))
            first, second = (_logits(model(tokens))[:, :2] for tokens in (one, other))
    except Exception:
        return
    finally:
        model.train(was_training)
    # Causal ones differ by the rounding of experts that get other tokens, up to 1e-7 in fp32; BERT with drawn weights
    # by 2e-3.
    least = max(1e-5, 4 * torch.finfo(first.dtype).eps) * float(first.abs().max())
    if not torch.allclose(first, second, rtol=0, atol=least):
        name = type(model).__name__
        decoder = hasattr(getattr(model, "config", None), "is_decoder")
        advice = "model.config.is_decoder=true where its attention follows that, or " if decoder else ""
        raise UserError(
            f"model.task=causal_lm: {name} attends to later tokens, so it would see the tokens it is to predict; use "
            f"{advice}a model that reads from left to right"
        )


@torch.no_grad()
def require_documents_apart(model: nn.Module) -> None:
    """Raises UserError for a model in which packed documents, told apart by their positions, see each other.

    Compares two short documents in one sequence with the second by itself. A trace has no values to compare.
    """
    name, setting = type(model).__name__, "data.pack=true"
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise UserError(f"{setting}: {name} takes no position_ids, which tell documents apart; use data.pack=false")
    given: Any = model
    if "flash" in str(getattr(given.config, "_attn_implementation", "")):
        raise UserError(
            f"{setting} with model.attention=flash_attention_2: it keeps documents apart only in micro-batches of one "
            "sample; use model.attention=sdpa"
        )
    parameter = next(model.parameters())
    if is_tracing() or parameter.is_meta:
        return
    was_training, device = model.training, parameter.device
    model.eval()
    with preserved_rng(device):
        first, second = torch.tensor([[0, 1, 2]], device=device), torch.tensor([[2, 0, 1]], device=device)
        positions = torch.tensor([[0, 1, 2, 0, 1, 2]], device=device)
        together = _logits(model(torch.cat([first, second], 1), position_ids=positions))[:, 3:]
        alone = _logits(model(second, position_ids=positions[:, :3]))
    model.train(was_training)
    if not torch.allclose(together, alone, rtol=1e-2, atol=1e-4 * float(alone.abs().max())):
        raise UserError(
            f"{setting}: in {name} a packed document changes what the next one computes (by "
            f"{float((together - alone).abs().max()):.2g}): its attention does not follow position_ids; use "
            "data.pack=false, or model.attention=sdpa"
        )


def _logits(output: Any) -> Tensor:
    logits: Tensor = output.logits if hasattr(output, "logits") else output[0]
    return logits.float()
