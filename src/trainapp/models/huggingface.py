"""Transformers models from a configuration, a folder or the hub: `model=hf`.

The model is Transformers' own, with its names, so `from_pretrained` opens an export. `models.inspect` reads it like any
other model.
"""

import inspect
import logging
import os
import weakref
from collections.abc import Sequence
from textwrap import shorten
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from torch import nn

from trainapp.config.targets import require_package
from trainapp.errors import UserError
from trainapp.models.inspect import positions_of, task_heads
from trainapp.torch_private import has_values
from trainapp.units import listed, suggest
from trainapp.validation import NonNegativeInt, PositiveInt, Str

log = logging.getLogger(__name__)

_CODE = ("trust_remote_code", "auto_map")  # settings that make Transformers download and run code

# Transformers' class for each value of `model.task`.
TASKS = {
    "causal_lm": "AutoModelForCausalLM",
    "masked_lm": "AutoModelForMaskedLM",
    "sequence_classification": "AutoModelForSequenceClassification",
    "token_classification": "AutoModelForTokenClassification",
    "image_classification": "AutoModelForImageClassification",
    "audio_classification": "AutoModelForAudioClassification",
    "video_classification": "AutoModelForVideoClassification",
    "base": "AutoModel",
}
_drawn: "weakref.WeakKeyDictionary[nn.Module, list[str]]" = weakref.WeakKeyDictionary()  # see `drawn`


def build(
    task: Str | None = None,
    config: dict[str, Any] | None = None,
    path: Str | None = None,
    revision: Str | None = None,
    attention: Literal["sdpa", "eager", "flash_attention_2", "flex_attention"] | None = None,
    vocab_size: PositiveInt | None = None,
    context_length: PositiveInt | None = None,
    num_classes: PositiveInt | None = None,
    classes: list[Str] | None = None,
    image_shape: Sequence[PositiveInt] | None = None,
    pad_token_id: NonNegativeInt | None = None,
) -> nn.Module:
    """A Transformers model, in fp32.

    task: task of the last layer, one of TASKS. config: `{model_type: llama, ...}`, initialised from the seed; with
    `path`, changes to the saved configuration. path: a folder, or a name on the hub. revision: revision on the hub.
    attention: implementation; None: Transformers' choice.
    Other parameters come from the data, if it knows them. Raises UserError for settings that do not fit each other or
    the data, and if Transformers is missing.
    """
    require_package("transformers", "model=hf")
    import transformers

    transformers.utils.logging.disable_progress_bar()  # the run has its own
    if task not in TASKS:
        hint = suggest(str(task), TASKS)
        raise UserError(f"model.task={'null' if task is None else task}: must be one of {', '.join(TASKS)}{hint}")
    kind = getattr(transformers, TASKS[task])
    place = None if path is None else os.path.expanduser(path)
    if place is not None and place.startswith((".", "/")) and not os.path.isdir(place):
        raise UserError(f"model.path={path}: there is no such folder, searched from {os.getcwd()}")
    source = f"model.config={config}" if path is None else f"model.path={path}"
    settings = _configuration(transformers, config, place, revision, source)
    given, is_new = config or {}, path is None
    _follow_tokens(settings, given, is_new, vocab_size, context_length)
    if num_classes is not None:
        _follow_classes(settings, given, num_classes, classes)
    if image_shape is not None and is_new:
        _follow_images(settings, given, image_shape)
    options: dict[str, Any] = {} if attention is None else {"attn_implementation": attention}
    options["dtype"] = torch.float32
    try:
        if place is None or not has_values(torch.empty(0)):  # a trace has none to load
            model: Any = kind.from_config(settings, **options)
        else:
            options["revision"] = revision or "main"
            model = _pretrained(kind, place, settings, options, num_classes is not None)
    except (ValueError, OSError, ImportError, SafetensorError) as error:
        raise UserError(f"{source}: {shorten(str(error), 400, placeholder=' ...')}") from error
    if num_classes is not None and pad_token_id is not None:
        # The batches' padding token, by which the model finds a text's last token. Set only after the embedding is
        # built, which would give it no gradient.
        model.config.get_text_config().pad_token_id = pad_token_id
    return model


def _configuration(
    transformers: Any, config: dict[str, Any] | None, path: str | None, revision: str | None, source: str
) -> Any:
    given = dict(config or {})
    refused = [name for name in given if name in _CODE or name.endswith("_implementation")]
    if refused:
        raise UserError(
            f"model.config.{refused[0]}: code shipped with a model and kernels on the hub are not run; omit it "
            "(model.attention chooses the attention implementation)"
        )
    if path is None and "model_type" not in given:
        raise UserError(
            f"model.config={config}: needs a model_type, as in model.config={{model_type: llama, hidden_size: 64}}; or "
            "set model.path to a folder or a model on the hub"
        )
    try:
        if path is not None:
            given["revision"] = revision or "main"
            return transformers.AutoConfig.from_pretrained(path, **given)
        return transformers.AutoConfig.for_model(given.pop("model_type"), **given)
    except Exception as error:  # configurations validate themselves, with their own error types; some list all models
        raise UserError(f"{source}: {shorten(str(error), 400, placeholder=' ...')}") from error


def _follow_tokens(
    settings: Any, given: dict[str, Any], is_new: bool, vocab_size: int | None, context_length: int | None
) -> None:
    """Set what the data determines and the user has not set. Raises UserError if they differ.

    is_new: whether the weights are newly initialised, so that shapes are free.
    """
    text = settings.get_text_config()
    if vocab_size is not None and is_new and "vocab_size" not in given:
        text.vocab_size = vocab_size
    if vocab_size is not None and getattr(text, "vocab_size", vocab_size) < vocab_size:
        raise UserError(
            f"model.config.vocab_size={text.vocab_size}: the data has {vocab_size} tokens; omit it, or use the "
            "model's own tokenizer"
        )
    longest = positions_of(settings)
    if context_length is not None and longest is not None and longest < context_length:
        if not is_new or "max_position_embeddings" in given:
            raise UserError(
                f"data.context_length={context_length}: the model has positions for {longest} tokens "
                "(max_position_embeddings); use a shorter context"
            )
        text.max_position_embeddings = context_length


def _follow_images(settings: Any, given: dict[str, Any], shape: Sequence[int]) -> None:
    channels, *size = shape
    side = size[0] if len(set(size)) == 1 else list(size)
    for name, value in {"num_channels": channels, "image_size": side}.items():
        if hasattr(settings, name) and name not in given:
            setattr(settings, name, value)


def _follow_classes(settings: Any, given: dict[str, Any], count: int, classes: Sequence[str] | None) -> None:
    """Set the number and names of the data's classes. Raises UserError if the configuration has others."""
    wanted = given.get("num_labels", len(given["id2label"]) if "id2label" in given else count)
    if wanted != count:
        raise UserError(f"model.config.num_labels={wanted}: the data has {count} classes; omit it")
    settings.num_labels = count
    if classes is not None and "id2label" not in given:
        settings.id2label = dict(enumerate(classes))
        settings.label2id = {name: number for number, name in enumerate(classes)}


def _pretrained(kind: Any, place: str, settings: Any, options: dict[str, Any], is_classifier: bool) -> Any:
    """The model with the weights at `place`, a folder or a name on the hub.

    A classifier with another number of classes, or a model for another task than the saved one, gets a new last layer;
    a note names it. Raises UserError if other weights are missing or have another shape.
    """
    saved_as = list(settings.architectures or ())
    options |= {"ignore_mismatched_sizes": True, "output_loading_info": True}
    model, report = kind.from_pretrained(place, config=settings, **options)
    resized = [name for name, *_ in report["mismatched_keys"]]
    new = task_heads(model) if is_classifier else []
    if wrong := sorted(name for name in resized if name.partition(".")[0] not in new):
        raise UserError(f"model.path={place}: model.config changes the shapes of {listed(wrong)}; omit those settings")
    # Old files lack `num_batches_tracked`.
    missing = [name for name in report["missing_keys"] if not name.endswith("num_batches_tracked")]
    is_same = type(model).__name__ in saved_as
    if lost := sorted(missing if is_same else (name for name in missing if not _is_of_task(model, name))):
        raise UserError(
            f"model.path={place}: it lacks weights of {type(model).__name__}, which would be initialised at random: "
            f"{listed(lost)}; name a complete folder, or choose the model.task of the saved model "
            f"({listed(saved_as) or 'unknown'})"
        )
    if names := sorted({*missing, *resized}):
        _drawn[model] = names
        log.warning(
            "model.path=%s: new for this task, initialised from train.seed, not pretrained: %s", place, ", ".join(names)
        )
    return model


def _is_of_task(model: nn.Module, name: str) -> bool:
    """Whether a tensor belongs to a layer that the task adds to the model's body, or to its pooler."""
    given: Any = model
    inside = "" if given.base_model is model else f"{given.base_model_prefix}."
    return not name.startswith(inside) or name.removeprefix(inside).startswith("pooler.")


def drawn(model: nn.Module) -> list[str]:
    """The tensors of a pretrained model that were newly initialised."""
    return _drawn.get(model, [])


def require_documents_apart(model: nn.Module) -> None:
    """Raises UserError for a model in which packed documents, separated by position ids, would see each other."""
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise UserError(
            f"data.pack=true: {type(model).__name__} takes no position_ids, which separate documents; use "
            "data.pack=false"
        )
    given: Any = model
    if "flash" in str(getattr(given.config, "_attn_implementation", "")):
        raise UserError(
            "data.pack=true with model.attention=flash_attention_2: it separates documents only in micro-batches of "
            "one sample; use model.attention=sdpa"
        )
