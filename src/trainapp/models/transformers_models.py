"""What the program reads from a model of Transformers, however it was built. Imports Transformers only if one exists.

Its blocks are the layers that Transformers itself would checkpoint, or the list of equal modules that it is made of.
"""

import contextlib
import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from trainapp.errors import UserError
from trainapp.torch_private import is_fake, is_tracing

_drawn: "weakref.WeakKeyDictionary[nn.Module, list[str]]" = weakref.WeakKeyDictionary()  # tensors: see `note_drawn`
_packed: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()  # models of sequences that hold several documents
# Configurations whose `use_cache` is off while a model trains, with the value that is published: by model.
_caches: "weakref.WeakKeyDictionary[nn.Module, list[tuple[Any, Any]]]" = weakref.WeakKeyDictionary()


def is_one(model: nn.Module) -> bool:
    """Whether the model is one of Transformers' classes, or of a class derived from one."""
    modeling = sys.modules.get("transformers.modeling_utils")
    return modeling is not None and isinstance(model, modeling.PreTrainedModel)


def prepare(model: nn.Module, packed: bool = False) -> None:
    """Switch the cache of keys and values off, which only generation reads. Does nothing to other models.

    With it, each layer of a checkpointed model appends to the cache a second time when it is recomputed, and packed
    documents would see each other: the models look for their borders only where there is no cache.
    packed: whether sequences hold several documents; for a trace, which cannot read that from their positions.
    """
    if not is_one(model):
        return
    if packed:
        _packed.add(model)
    if is_tracing():
        _tell_borders(model in _packed)
    if model in _caches:
        return
    config: Any = model.config
    parts = [config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", ()))]
    kept = [(part, part.use_cache) for part in parts if getattr(part, "use_cache", None) is not None]
    for part, _ in kept:
        part.use_cache = False
    _caches[model] = kept


def _tell_borders(packed: bool) -> None:
    """In a trace Transformers cannot read whether the positions that a model makes for itself restart, and would build
    an attention mask as if they did, which no run has. This answers for it. Real tensors are read as before.
    """
    masking: Any = sys.modules.get("transformers.masking_utils")
    find = getattr(masking, "find_packed_sequence_indices", None)
    if find is None:  # another version of Transformers: then such a plan is an estimate, and says so
        return
    own = getattr(find, "__wrapped__", find)

    @functools.wraps(own)
    def known(position_ids: Tensor) -> Any:
        documents = own(position_ids)
        are_its_own = not packed and (len(position_ids) == 1 or position_ids.stride(0) == 0)  # one row for all samples
        return None if are_its_own and is_fake(position_ids) else documents

    masking.find_packed_sequence_indices = known


@contextlib.contextmanager
def as_published(model: nn.Module) -> Iterator[None]:
    """Inside the block the model's configuration is the one to be saved."""
    kept = _caches.get(model, [])
    try:
        for part, value in kept:
            part.use_cache = value
        yield
    finally:
        for part, _ in kept:
            part.use_cache = False


def blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated layers, outermost ones only; none for other models."""
    if not is_one(model):
        return []
    layers = sys.modules.get("transformers.modeling_layers")
    found = [] if layers is None else _outermost(model, layers.GradientCheckpointingLayer)
    if found:
        return found
    lists = [[*module] for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) > 1]
    alike = [members for members in lists if len({type(member) for member in members}) == 1]
    return max(alike, key=lambda members: sum(p.numel() for m in members for p in m.parameters()), default=[])


def _outermost(root: nn.Module, kind: type) -> list[nn.Module]:
    found: list[nn.Module] = []
    for child in root.children():
        found += [child] if isinstance(child, kind) else _outermost(child, kind)
    return list(dict.fromkeys(found))


def features_and_head(model: nn.Module) -> tuple[Callable[..., Tensor], nn.Module] | None:
    """The model without its last layer, and that layer; None for other models, and for one without output embeddings.

    Whether the one after the other is the model's forward, `chunked_loss.require_same_forward` checks: some models
    scale or cap their logits.
    """
    if not is_one(model):
        return None
    given: Any = model
    head, base = given.get_output_embeddings(), given.base_model
    if head is None or base is model:
        return None

    def features(inputs: Tensor, **others: Tensor) -> Tensor:
        hidden: Tensor = base(inputs, **others).last_hidden_state
        return hidden

    return features, head


def heads(model: nn.Module) -> list[str]:
    """The names of the modules beside the model's body, which a pretrained body comes without: a classifier, say. None
    where the last layer is the language model's own.
    """
    if not is_one(model):
        return []
    given: Any = model
    base = given.base_model
    if base is model or given.get_output_embeddings() is not None:
        return []
    return [
        name for name, child in model.named_children() if child is not base and any(True for _ in child.parameters())
    ]


def is_of_task(model: nn.Module, name: str) -> bool:
    """Whether a tensor belongs to what a task adds to the model's body: a layer beside it, or its pooler."""
    given: Any = model
    base = given.base_model
    inside = "" if base is model else f"{given.base_model_prefix}."
    return not name.startswith(inside) or name.removeprefix(inside).startswith("pooler.")


def note_drawn(model: nn.Module, names: list[str]) -> None:
    """These tensors are not pretrained, though the others are."""
    _drawn[model] = names


def drawn(model: nn.Module) -> list[str]:
    """The tensors of a pretrained model that are not pretrained."""
    return _drawn.get(model, [])


def positions_of(config: Any) -> int | None:
    """The longest sequence that a model reads; None where it has no limit (for which XLNet has -1)."""
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    return longest if isinstance(longest, int) and longest > 0 else None


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
