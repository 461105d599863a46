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

_CODE_SETTINGS = ("trust_remote_code", "auto_map")  # settings that make Transformers download and run code

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
# By pretrained model: the tensors that were newly initialised.
_new_tensors: "weakref.WeakKeyDictionary[nn.Module, list[str]]" = weakref.WeakKeyDictionary()


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
    """Return a Transformers model, in fp32.

    Raises UserError for settings that do not fit each other or the data, and if Transformers is missing.

    Args:
        task: of the last layer, one of TASKS.
        config: `{model_type: llama, ...}`, initialised from the seed; with `path`, changes to the saved configuration.
        path: a folder, or a name on the hub.
        revision: revision on the hub.
        attention: implementation; None: Transformers' choice.
        vocab_size: from the data, if it knows it, like all that follow.
        image_shape: (channels, height, width).
    """
    require_package("transformers", "model=hf")
    import transformers

    transformers.utils.logging.disable_progress_bar()  # the run has its own
    model_class = getattr(transformers, _class_name(task))
    location = None if path is None else _folder_or_hub_name(path)
    source = f"model.config={config}" if path is None else f"model.path={path}"
    model_config = _configuration(transformers, config, location, revision, source)

    # What the data determines and the user has not set. The shapes of a new model are free.
    user_settings = config or {}
    _set_vocab_size(model_config, user_settings, path is None, vocab_size)
    _set_context_length(model_config, user_settings, path is None, context_length)
    _set_classes(model_config, user_settings, num_classes, classes)
    if path is None:
        _set_image_shape(model_config, user_settings, image_shape)

    options: dict[str, Any] = {"dtype": torch.float32}
    if attention is not None:
        options["attn_implementation"] = attention
    try:
        if location is None or not has_values(torch.empty(0)):  # a trace has no values to load
            model: Any = model_class.from_config(model_config, **options)
        else:
            options["revision"] = revision or "main"
            model = _pretrained(model_class, location, model_config, options, num_classes is not None)
    except (ValueError, OSError, ImportError, SafetensorError) as error:
        raise UserError(f"{source}: {_shortened(error)}") from error

    if num_classes is not None and pad_token_id is not None:
        # The batches' padding token, by which the model finds a text's last token. Set only after the embedding is
        # built, which would give it no gradient.
        model.config.get_text_config().pad_token_id = pad_token_id
    return model


def _class_name(task: str | None) -> str:
    """Return the name of Transformers' class for a task. Raises UserError for an unknown one."""
    if task not in TASKS:
        value = "null" if task is None else task
        hint = suggest(str(task), TASKS)
        raise UserError(f"model.task={value}: must be one of {', '.join(TASKS)}{hint}")
    return TASKS[task]


def _folder_or_hub_name(path: str) -> str:
    """Return the path with `~` expanded. Raises UserError if it can only be a folder, and there is none."""
    location = os.path.expanduser(path)
    if location.startswith((".", "/")) and not os.path.isdir(location):
        raise UserError(f"model.path={path}: there is no such folder, searched from {os.getcwd()}")
    return location


def _configuration(
    transformers: Any, config: dict[str, Any] | None, location: str | None, revision: str | None, source: str
) -> Any:
    """Return Transformers' configuration of the model: the saved one with changes, or a new one.

    Args:
        transformers: the package.
        config: the setting `model.config`.
        location: a folder, or a name on the hub; None for a new model.
        revision: revision on the hub.
        source: the setting that names the model, with its value, for messages.
    """
    settings = dict(config or {})
    refused = [name for name in settings if name in _CODE_SETTINGS or name.endswith("_implementation")]
    if refused:
        raise UserError(
            f"model.config.{refused[0]}: code shipped with a model and kernels on the hub are not run; omit it "
            "(model.attention chooses the attention implementation)"
        )
    if location is None and "model_type" not in settings:
        raise UserError(
            f"model.config={config}: needs a model_type, as in model.config={{model_type: llama, hidden_size: 64}}; or "
            "set model.path to a folder or a model on the hub"
        )
    try:
        if location is None:
            return transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
        settings["revision"] = revision or "main"
        return transformers.AutoConfig.from_pretrained(location, **settings)
    except Exception as error:  # configurations validate themselves, with their own error types; some list all models
        raise UserError(f"{source}: {_shortened(error)}") from error


def _shortened(error: Exception) -> str:
    return shorten(str(error), 400, placeholder=" ...")


def _set_vocab_size(model_config: Any, user_settings: dict[str, Any], is_new: bool, vocab_size: int | None) -> None:
    """Give a new model the data's number of tokens. Raises UserError for a model with fewer."""
    if vocab_size is None:
        return
    text_config = model_config.get_text_config()
    if is_new and "vocab_size" not in user_settings:
        text_config.vocab_size = vocab_size
    model_vocab_size = getattr(text_config, "vocab_size", vocab_size)
    if model_vocab_size < vocab_size:
        raise UserError(
            f"model.config.vocab_size={model_vocab_size}: the data has {vocab_size} tokens; omit it, or use the "
            "model's own tokenizer"
        )


def _set_context_length(
    model_config: Any, user_settings: dict[str, Any], is_new: bool, context_length: int | None
) -> None:
    """Give a new model positions for the data's samples. Raises UserError for a model with fewer."""
    longest = positions_of(model_config)
    if context_length is None or longest is None or longest >= context_length:
        return
    if not is_new or "max_position_embeddings" in user_settings:
        raise UserError(
            f"data.context_length={context_length}: the model has positions for {longest} tokens "
            "(max_position_embeddings); use a shorter context"
        )
    model_config.get_text_config().max_position_embeddings = context_length


def _set_classes(
    model_config: Any, user_settings: dict[str, Any], num_classes: int | None, classes: Sequence[str] | None
) -> None:
    """Set the number and names of the data's classes. Raises UserError if the user has set another number."""
    if num_classes is None:
        return

    # The user's number, given by itself or by the names of the classes, must be the data's.
    num_labels = num_classes
    if "num_labels" in user_settings:
        num_labels = user_settings["num_labels"]
    elif "id2label" in user_settings:
        num_labels = len(user_settings["id2label"])
    if num_labels != num_classes:
        raise UserError(f"model.config.num_labels={num_labels}: the data has {num_classes} classes; omit it")

    model_config.num_labels = num_classes
    if classes is not None and "id2label" not in user_settings:
        model_config.id2label = dict(enumerate(classes))
        model_config.label2id = {name: number for number, name in enumerate(classes)}


def _set_image_shape(model_config: Any, user_settings: dict[str, Any], image_shape: Sequence[int] | None) -> None:
    """Give a new model the shape of the data's images."""
    if image_shape is None:
        return
    channels, *size = image_shape
    is_square = len(set(size)) == 1
    image_size = size[0] if is_square else size
    for name, value in (("num_channels", channels), ("image_size", image_size)):
        if hasattr(model_config, name) and name not in user_settings:
            setattr(model_config, name, value)


def _pretrained(
    model_class: Any, location: str, model_config: Any, options: dict[str, Any], is_classifier: bool
) -> Any:
    """Return the model with the weights at `location`, a folder or a name on the hub.

    A classifier with another number of classes, or a model for another task than the saved one, gets a new last layer;
    a note names it. Raises UserError if other weights are missing or have another shape.
    """
    # Load all that fits, with a report of what does not.
    saved_classes = list(model_config.architectures or ())
    model, report = model_class.from_pretrained(
        location, config=model_config, ignore_mismatched_sizes=True, output_loading_info=True, **options
    )

    # Only a classifier's own layers may have another shape than the saved ones.
    misshaped = [name for name, *_ in report["mismatched_keys"]]
    replaceable: list[str] = []
    if is_classifier:
        replaceable = task_heads(model)
    refused = sorted(name for name in misshaped if name.partition(".")[0] not in replaceable)
    if refused:
        raise UserError(
            f"model.path={location}: model.config changes the shapes of {listed(refused)}; omit those settings"
        )

    # Only another task's own layers may be missing. (Old files lack `num_batches_tracked`.)
    missing = [name for name in report["missing_keys"] if not name.endswith("num_batches_tracked")]
    refused = sorted(missing)
    if type(model).__name__ not in saved_classes:
        refused = [name for name in refused if not _is_of_task(model, name)]
    if refused:
        raise UserError(
            f"model.path={location}: it lacks weights of {type(model).__name__}, which would be initialised at random: "
            f"{listed(refused)}; name a complete folder, or choose the model.task of the saved model "
            f"({listed(saved_classes) or 'unknown'})"
        )

    # All others that the files lack are new.
    new_tensors = sorted({*missing, *misshaped})
    if new_tensors:
        _new_tensors[model] = new_tensors
        log.warning(
            "model.path=%s: new for this task, initialised from train.seed, not pretrained: %s",
            location,
            ", ".join(new_tensors),
        )
    return model


def _is_of_task(model: Any, name: str) -> bool:
    """Return whether a tensor belongs to a layer that the task adds to the model's body, or to its pooler."""
    body_prefix = "" if model.base_model is model else f"{model.base_model_prefix}."
    if not name.startswith(body_prefix):
        return True
    return name.removeprefix(body_prefix).startswith("pooler.")


def newly_initialised(model: nn.Module) -> list[str]:
    """Return the names of a pretrained model's tensors that do not come from its files."""
    return _new_tensors.get(model, [])


def require_documents_apart(model: nn.Module) -> None:
    """Raise UserError for a model in which packed documents, separated by position ids, would see each other."""
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise UserError(
            f"data.pack=true: {type(model).__name__} takes no position_ids, which separate documents; use "
            "data.pack=false"
        )
    attention = getattr(model.config, "_attn_implementation", "")
    if "flash" in str(attention):
        raise UserError(
            "data.pack=true with model.attention=flash_attention_2: it separates documents only in micro-batches of "
            "one sample; use model.attention=sdpa"
        )
