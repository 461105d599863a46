"""Messages for mistakes in commands and YAML files that Hydra finds, and for settings of earlier versions. Imports no
torch.
"""

import re
from collections.abc import Sequence

import yaml
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainapp.files import CONF
from trainapp.units import suggest

# Settings and options (`group=option`) of earlier versions, and their replacements.
RENAMED = {
    "activation_checkpointing=budget": "is now activation_checkpointing=auto",
    "activation_checkpointing.bytes": "was removed; activation_checkpointing=auto keeps what fits memory.limit",
    "batch.micro_size=plan": "was removed; mode=plan prints the size to set",
    "checkpointing.load": "was removed; start from another run's weights with model.init_from=RUN",
    "export.file_size": "was removed; safetensors has no size limit",
    "oom.keep_global_batch": "was removed; the global batch never changes, only its split into micro-batches",
    "oom.plan": "was removed; recovery uses what the failed step measured",
    "oom.remember": "was removed; a run depends only on its configuration and checkpoint",
    "optimizer=adamw_fp8": "was removed; use optimizer=adamw_8bit",
    "parallel.endpoint": "was removed; start a run on several machines with torchrun or srun",
    "parallel.nodes": "was removed; start a run on several machines with torchrun or srun",
    "parallel.run_id": "was removed; set the run's directory: hydra.run.dir=outputs/NAME",
    "plan.levers": "is now plan.techniques",
}


def renamed(setting: str, value: object = None) -> str | None:
    """Return a note on a setting, or a value of it, from an earlier version; None for all others."""
    for name in (setting, f"{setting}={value}", f"{setting.removesuffix('.mode')}={value}"):
        if name in RENAMED:
            return f"{name}: {RENAMED[name]}"
    return None


def explain(error: BaseException, arguments: Sequence[str]) -> str | None:
    """Return the message for a mistake that Hydra has found, or None for an error that needs its traceback. It is
    Hydra's message, plus a suggestion if one is close.
    """
    # Mistakes that raise other errors than Hydra's.
    if isinstance(error, ValueError) and str(error).startswith("Config group override"):
        return _explain_option_without_name(error, arguments)
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
        return _explain_yaml(error, error.problem_mark)
    if not isinstance(error, HydraException | OmegaConfBaseException):
        return None

    # Strip what does not help to correct the mistake.
    text = str(error).strip().partition("\nConfig search path:")[0].strip()
    text = re.sub(r"^Error when parsing index: .*\n", "", text)  # Hydra 1.4 repeats all overrides there

    missing_option = re.search(r"Could not find '([^']+)/([^'/]+)'", text)
    if missing_option is not None:
        _, _, options_text = text.partition("Available options")
        choices = re.findall(r"^\s+(\S+)$", options_text, re.MULTILINE)
        return _explain_missing_option(missing_option[1], missing_option[2], choices)

    missing_setting = re.search(r"Could not override '([^']+)'", text)
    if missing_setting is not None:
        return _explain_missing_setting(missing_setting[1], error)

    if "Cannot merge DictConfig with ListConfig" in text:
        return _explain_list(text)

    # Everything else in Hydra's words, plus those of the cause, which often say more.
    cause = str(error.__cause__ or "").strip()
    if cause not in text:
        text = f"{text}\n{cause}"
    return text


def _explain_option_without_name(error: ValueError, arguments: Sequence[str]) -> str:
    """Return the message for a number, true, false or null in place of an option; Hydra's error does not say where."""
    # The first override that may be meant.
    pattern = re.compile(r"\+?(\w+)=(-?[\d.]+|true|false|null)")
    matches = [match for match in map(pattern.fullmatch, arguments) if match and (CONF / match[1]).is_dir()]
    if not matches:
        return f"{error}: an option is chosen by its name; `trainapp --help` lists them"

    override, group, value = matches[0].group(0, 1, 2)
    remedy = "`trainapp --help` lists them"
    if value == "null":
        remedy = _instead_of_null(group)
    return f"{override}: an option is chosen by its name; {remedy}"


_MAY_BE_EMPTY = ("callbacks", "tracker", "experiment", "debug")  # groups


def _instead_of_null(group: str) -> str:
    """Return what has the effect that null was to have: also where an experiment has chosen an option."""
    if group in ("data", "model", "optimizer", "schedule"):
        return f"choose one, or a class with {group}._target_=CLASS"
    if group in _MAY_BE_EMPTY:
        return f"for none, use '{group}=[]'"
    options = sorted(path.stem for path in (CONF / group).glob("*.yaml"))
    if "none" in options:
        return f"for none, use {group}=none"
    return f"choose one of {', '.join(options)}"


def _explain_yaml(error: yaml.MarkedYAMLError, mark: yaml.Mark) -> str:
    """Return the message for a file that is not valid YAML, with the position of the mistake."""
    message = f"{mark.name}, line {mark.line + 1}, column {mark.column + 1}: not valid YAML: {error.problem}"
    if error.problem and "'?'" in error.problem:
        message += "; inside braces, ??? needs quotes"
    return message


def _explain_list(text: str) -> str:
    """Return the message for a list in place of a section, of which Hydra's error names the file alone."""
    file = re.search(r"In '([^']+)'", text)
    place = f"{file[1]}.yaml: " if file is not None else ""
    return (
        f"{place}a list stands where a section is, as in `tracker: []`; the options of a group are chosen in the "
        "`defaults` list: `- override /tracker: []` for none, `- override /tracker: [csv]` for one"
    )


def _explain_missing_option(group: str, name: str, choices: Sequence[str]) -> str:
    """Return the message for an option that a group does not have."""
    note = renamed(group, name)
    if note is not None:
        return note
    available = ", ".join(choices) or "none"
    return f"{group}={name}: no such option{suggest(name.lower(), choices)}; available: {available}"


def _explain_missing_setting(setting: str, error: BaseException) -> str:
    """Return the message for a setting that does not exist: which may be meant, or else how to add an argument that the
    YAML files do not list.
    """
    note = renamed(setting)
    if note is not None:
        return note

    # The names in the same section, which OmegaConf's error has; beside the sections also groups of options.
    section, _, key = setting.rpartition(".")
    choices: list[str] = []
    node = getattr(error.__cause__ or error, "parent_node", None)
    if node is not None and OmegaConf.is_dict(node):
        choices.extend(str(name) for name in node)
    if not section:
        choices.extend(folder.name for folder in CONF.iterdir())

    hint = suggest(key, [choice for choice in choices if choice != key])  # a group may have no option chosen
    if not hint:
        hint = f"; `trainapp --cfg job` shows all; to add one that the YAML files do not list, use +{setting}=VALUE"
    return f"{setting}: no such setting{hint}"
