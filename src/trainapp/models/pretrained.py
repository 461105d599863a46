"""Loads pretrained weights into a Transformers model; refuses missing ones, except a new head, which is logged."""

import logging
import pickle
from typing import Any

from safetensors import SafetensorError
from torch import nn

from trainapp.errors import UserError
from trainapp.models import transformers_models
from trainapp.units import listed

log = logging.getLogger(__name__)

# What files that are cut off or of another kind raise; `OSError` and `ValueError` have reasons of their own.
_DAMAGED = (SafetensorError, pickle.UnpicklingError, EOFError, KeyError, RuntimeError)


def pretrained(kind: Any, place: str, settings: Any, options: dict[str, Any], is_classifier: bool) -> Any:
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
