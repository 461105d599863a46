"""Models of Transformers from a configuration, a folder or the hub: `model=hf`.

The model is Transformers' own, with its names: what is exported is what `from_pretrained` opens. `transformers_models`
says how the rest of the program reads it.
"""

import logging
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from torch import nn

from trainapp.errors import UserError
from trainapp.models import transformers_models
from trainapp.torch_private import is_tracing
from trainapp.units import listed, suggest
from trainapp.validation import Bool, NonNegativeInt, PositiveInt, Str

log = logging.getLogger(__name__)

_CODE = ("trust_remote_code", "auto_map")  # settings by which Transformers would download and run code

# What files that are cut off or of another kind raise; `OSError` and `ValueError` have reasons of their own.
_DAMAGED = (SafetensorError, pickle.UnpicklingError, EOFError, KeyError, RuntimeError)

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
    packed: Bool = False,
) -> nn.Module:
    """A model of Transformers, in fp32.

    task: what its last layer is for, one of TASKS. config: `{model_type: llama, ...}`, drawn from the seed; with
    `path`, changes of what is there. path: a folder, or a name on the hub. revision: on the hub. attention: how it is
    computed; None: Transformers' choice.
    The others come from the data, where it knows them. packed: whether its sequences hold several documents.
    Raises UserError for settings that do not fit each other or the data, and where Transformers is missing.
    """
    transformers = require_transformers("model=hf")
    if path is not None and torch.empty(0).is_meta and not is_tracing():
        raise UserError(
            f"model.path={path} with parallel.fsdp.meta_init=true: weights are read into a model in host memory; use "
            "parallel.fsdp.meta_init=false"
        )
    kind = getattr(transformers, _class_of(task))
    settings = _configuration(transformers, config, path, revision)
    from_data = {"vocab_size": vocab_size, "num_classes": num_classes, "classes": classes, "image_shape": image_shape}
    _follow_data(settings, config or {}, path is None, from_data, context_length)
    options: dict[str, Any] = {} if attention is None else {"attn_implementation": attention}
    try:
        if path is None or is_tracing():  # a trace has no values to load
            model: Any = kind.from_config(settings, dtype=torch.float32, **options)
        else:
            options |= {"revision": revision or "main", "dtype": torch.float32}
            model = _pretrained(kind, _place(path), settings, options, num_classes is not None)
    except (ValueError, OSError, ImportError) as error:
        raise UserError(f"{_named(config, path)}: {_first_lines(error)}") from error
    transformers_models.prepare(model, packed)
    if task == "causal_lm":
        transformers_models.require_causal(model)
    _require_embeddings(model, vocab_size, path)
    text = model.config.get_text_config()
    if num_classes is not None and pad_token_id is not None:
        # That of the batches, to find the last token of a text. Set after the embedding is built, where it would mean
        # "no gradient".
        text.pad_token_id = pad_token_id
    if packed:
        transformers_models.require_documents_apart(model)
    built: nn.Module = model
    return built


def require_transformers(setting: str) -> Any:
    """The package. Raises UserError, with the command that installs it, where it is missing."""
    try:
        import transformers

        transformers.PreTrainedModel  # noqa: B018  # loaded when it is looked up, and every model needs it
    except ImportError as error:
        raise UserError(f"{setting}: needs Transformers ({error}); pip install 'trainapp[hf]'") from None
    transformers.utils.logging.disable_progress_bar()  # the run has one of its own
    return transformers


def _class_of(task: str | None) -> str:
    if task not in TASKS:
        hint = suggest(str(task), TASKS)
        raise UserError(f"model.task={'null' if task is None else task}: must be one of {', '.join(TASKS)}{hint}")
    return TASKS[task]


def _named(config: dict[str, Any] | None, path: str | None) -> str:
    return f"model.path={path}" if path is not None else f"model.config={config}"


def _place(path: str) -> str:
    """The folder, where there is one; else a name on the hub."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return str(folder)
    if path.startswith((".", "/", "~")) or path.count("/") > 1:
        raise UserError(f"model.path={path}: there is no such folder, searched from {Path.cwd()}")
    return path


def _configuration(transformers: Any, config: dict[str, Any] | None, path: str | None, revision: str | None) -> Any:
    given = dict(config or {})
    refused = [name for name in given if name in _CODE or name.endswith("_implementation")]
    if refused:
        raise UserError(
            f"model.config.{refused[0]}: code that comes with a model is not run, nor kernels of the hub; leave it out "
            "(model.attention chooses among the kinds of attention)"
        )
    if path is None and "model_type" not in given:
        raise UserError(
            f"model.config={config}: needs a model_type, as in model.config={{model_type: llama, hidden_size: 64}}; or "
            "name a folder or a model of the hub by model.path"
        )
    try:
        if path is not None:
            return transformers.AutoConfig.from_pretrained(_place(path), revision=revision or "main", **given)
        return transformers.AutoConfig.for_model(given.pop("model_type"), **given)
    except UserError:
        raise
    except Exception as error:  # a configuration checks itself, with errors of its own
        raise UserError(f"{_named(config, path)}: {_first_lines(error)}") from error


def _first_lines(error: Exception) -> str:
    """Transformers lists hundreds of model types in one line."""
    text = " ".join(str(error).split())
    return text if len(text) < 400 else f"{text[:400]} ..."


def _follow_data(
    settings: Any, given: dict[str, Any], is_new: bool, data: dict[str, Any], context_length: int | None
) -> None:
    """Set what the data decides and the user has not. Raises UserError where they differ.

    is_new: whether the weights are drawn, so that shapes are free.
    """
    text, vocab_size, classes = settings.get_text_config(), data["vocab_size"], data["classes"]
    if vocab_size is not None and is_new and "vocab_size" not in given:
        text.vocab_size = vocab_size
    if vocab_size is not None and getattr(text, "vocab_size", vocab_size) < vocab_size:
        raise UserError(
            f"model.config.vocab_size={text.vocab_size}: the data has {vocab_size} tokens; leave it out, or use the "
            "model's own tokenizer"
        )
    longest = transformers_models.positions_of(settings)
    if context_length is not None and longest is not None and longest < context_length:
        if not is_new or "max_position_embeddings" in given:
            raise UserError(
                f"data.context_length={context_length}: the model has positions for {longest} tokens "
                "(max_position_embeddings); use a shorter context"
            )
        text.max_position_embeddings = context_length
    if data["num_classes"] is not None:
        if not is_new and classes is not None:
            _require_same_order(settings.id2label, classes)
        _set_classes(settings, given, data["num_classes"], classes)
    if data["image_shape"] is not None and is_new:
        channels, *size = data["image_shape"]
        side = size[0] if len(set(size)) == 1 else list(size)
        for name, value in {"num_channels": channels, "image_size": side}.items():
            if hasattr(settings, name) and name not in given:
                setattr(settings, name, value)


def _set_classes(settings: Any, given: dict[str, Any], count: int, classes: Sequence[str] | None) -> None:
    wanted = given.get("num_labels", len(given["id2label"]) if "id2label" in given else count)
    if wanted != count:
        raise UserError(f"model.config.num_labels={wanted}: the data has {count} classes; leave it out")
    if settings.num_labels != count:
        settings.num_labels = count
    if classes is not None and "id2label" not in given:
        settings.id2label = dict(enumerate(classes))
        settings.label2id = {name: number for number, name in enumerate(classes)}


def _require_same_order(of_model: dict[int, str], classes: Sequence[str]) -> None:
    """Raises UserError where a model and the data have the same classes in another order: each would be trained as
    another.
    """
    own = [of_model[number] for number in sorted(of_model)]
    if own != list(classes) and sorted(own) == sorted(classes):
        raise UserError(
            f"model.path: its classes are {', '.join(own)}, and the data has them in another order "
            f"({', '.join(classes)}); set data.classes=[{', '.join(own)}]"
        )


def _require_embeddings(model: Any, vocab_size: int | None, path: str | None) -> None:
    if vocab_size is None or path is None:
        return
    embeddings = model.get_input_embeddings()
    if isinstance(embeddings, nn.Embedding) and embeddings.num_embeddings < vocab_size:
        raise UserError(
            f"model.path={path}: it has embeddings of {embeddings.num_embeddings} tokens, the data has {vocab_size}; "
            "use the model's own tokenizer (data.tokenizer)"
        )


def _pretrained(kind: Any, place: str, settings: Any, options: dict[str, Any], is_classifier: bool) -> Any:
    """The model with the weights at `place`, a folder or a name on the hub.

    A classifier with another number of classes gets a new last layer, and so does a model for another task than that of
    the saved one; a note names it. Raises UserError where other weights are missing, damaged, or of another shape.
    """
    saved_as = list(settings.architectures or ())
    options |= {"ignore_mismatched_sizes": True, "output_loading_info": True}
    try:
        model, report = kind.from_pretrained(place, config=settings, **options)
    except _DAMAGED as error:
        if isinstance(error, RuntimeError) and not _is_of_files(error):  # memory that runs out, say
            raise
        raise UserError(
            f"model.path={place}: its weights cannot be read ({type(error).__name__}: {str(error)[:200]}): a file is "
            "damaged or incomplete, and has to be downloaded or copied again, or model.config names something that "
            "this version of Transformers does not have"
        ) from error
    new = transformers_models.heads(model) if is_classifier else []
    wrong = sorted(name for name, *_ in report["mismatched_keys"] if name.partition(".")[0] not in new)
    if wrong:
        raise UserError(
            f"model.path={place}: model.config asks for other shapes of {listed(wrong)} than there are; leave those "
            "settings out"
        )
    resized = [name for name, *_ in report["mismatched_keys"]]
    _require_rest(model, place, saved_as, list(report["missing_keys"]), resized)
    return model


def _is_of_files(error: RuntimeError) -> bool:
    """Whether torch says so of an archive that `torch.save` wrote."""
    return "PytorchStreamReader" in str(error) or "archive" in str(error)


def _require_rest(model: nn.Module, place: str, saved_as: list[str], missing: list[str], resized: list[str]) -> None:
    """Raises UserError for weights that are not there, unless they are of a task that the saved model was not for: then
    notes that they are drawn.
    """
    missing = [name for name in missing if not name.endswith("num_batches_tracked")]  # which old files lack
    is_same = type(model).__name__ in saved_as
    lost = sorted(missing if is_same else (name for name in missing if not transformers_models.is_of_task(model, name)))
    if lost:
        saved = f", saved as {listed(saved_as)}" if saved_as else ""
        raise UserError(
            f"model.path={place}: it lacks weights of {type(model).__name__}, which would be drawn at random: "
            f"{listed(lost)}; name a folder that is complete (this one{saved}), or choose the model.task of the saved "
            "model"
        )
    drawn = sorted({*missing, *resized})
    if drawn:
        transformers_models.note_drawn(model, drawn)
        log.warning(
            "model.path=%s: new for this task, drawn from train.seed and not pretrained: %s", place, ", ".join(drawn)
        )
