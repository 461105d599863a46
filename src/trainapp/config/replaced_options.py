"""A class in place of a group's option: `optimizer: {_target_: CLASS}` in a YAML file, or `optimizer._target_=CLASS` on
the command line.

Hydra merges it over the group's default option, whose settings belong to another class: NAdam would decay its weights
as AdamW does, and SGD be given AdamW's betas. Here such an option is left out of the defaults list. What stays are the
settings common to the group (in conf/train.yaml) and all that the user wrote; what is unset is the class's own default.
An option that is chosen beside the class, in the same file's defaults list or on the command line, keeps its settings.

Hydra has no hook between the defaults list and the merge, so `install` replaces the function that makes the list, which
is the same in Hydra 1.3.8 and 1.4.0rc3. All compositions pass through it: runs, a sweep's jobs, --cfg and --info.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hydra._internal import config_loader_impl, defaults_list
from hydra._internal.config_repository import IConfigRepository
from hydra._internal.defaults_list import DefaultsList
from hydra.core.default_element import ResultDefault
from hydra.core.override_parser.types import ChoiceSweep, Override, OverrideType
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf

GROUPS = ("data", "model", "optimizer", "schedule")
_MARK = "hydra/trainapp"  # a configuration that other programs with Hydra do not have


def install() -> None:
    """Let Hydra compose by this rule in this process, except for other programs. Raises AttributeError if this version
    of Hydra lacks the function.
    """
    loader: Any = config_loader_impl
    if loader.create_defaults_list is not _create_defaults_list:
        loader.create_defaults_list = _create_defaults_list


def _create_defaults_list(
    repo: IConfigRepository, config_name: str | None, overrides_list: list[Override], **more: bool
) -> DefaultsList:
    """Hydra's `create_defaults_list`, without options that a class replaces."""
    defaults = defaults_list.create_defaults_list(
        repo=repo, config_name=config_name, overrides_list=overrides_list, **more
    )
    if repo.config_exists(_MARK):
        composition = _Composition(repo, defaults, overrides_list)
        for option in composition.options():
            if composition.is_replaced(option):
                composition.leave_out(option)
    return defaults


@dataclass(frozen=True)
class _Option:
    """The option that is chosen for a group."""

    key: str  # as in a defaults list: optimizer, data@eval.hard
    package: str  # the section that it fills: optimizer, eval.hard
    config_path: str  # optimizer/adamw
    entries: list[ResultDefault]  # the option, and what its own defaults list adds to it

    @property
    def name(self) -> str:
        return self.config_path.rpartition("/")[2]

    @property
    def class_setting(self) -> str:
        return f"{self.package}._target_"


class _Composition:
    """A defaults list, the command line's overrides, and the contents of the files."""

    def __init__(self, repo: IConfigRepository, defaults: DefaultsList, overrides: list[Override]):
        self._repo, self._defaults, self._overrides = repo, defaults, overrides
        self._contents: dict[str, Any] = {}  # by path; plain containers

    def options(self) -> list[_Option]:
        """Return the options of the groups that name classes. One for the whole configuration (`@package _global_`) is
        not among them: it is like an experiment.
        """
        options = []
        for key, name in self._defaults.overrides.known_choices.items():
            group, _, package = key.partition("@")
            if group in GROUPS and name is not None:
                path = f"{group}/{name}"
                entries = self._entries_of(path, package or group)
                if entries:
                    options.append(_Option(key, package or group, path, entries))
        return options

    def is_replaced(self, option: _Option) -> bool:
        """Return whether a class is named after the option, and the option was not chosen beside it. Raises
        ConfigCompositionException for an option that is chosen over the class of a file: on the command line, or in a
        later file.
        """
        is_on_command_line = any(_sets(override, option.class_setting) for override in self._overrides)
        is_chosen_there = any(_chooses(override, option) for override in self._overrides)
        if is_on_command_line:
            return not is_chosen_there
        naming = self._files_naming_a_class_after(option)
        if not naming:
            return False
        chosen_in = self._chosen_in(option)
        if is_chosen_there or self._is_later(chosen_in, naming[-1]):
            raise ConfigCompositionException(_conflict(option, naming[-1], None if is_chosen_there else chosen_in))
        return naming[-1].config_path != chosen_in

    def _is_later(self, config_path: str | None, entry: ResultDefault) -> bool:
        """Return whether a file comes after an entry in the defaults list."""
        entries = self._defaults.defaults
        return any(later.config_path == config_path for later in entries[entries.index(entry) + 1 :])

    def _files_naming_a_class_after(self, option: _Option) -> list[ResultDefault]:
        """Return the files behind the option in the defaults list that set the class of its group."""
        entries = self._defaults.defaults
        position = max(entries.index(entry) for entry in option.entries)
        return [entry for entry in entries[position + 1 :] if self._sets(entry, option.class_setting)]

    def leave_out(self, option: _Option) -> None:
        """Compose without the option. Overrides of its settings then add them, as if each had a `++`, and need not
        remove them.
        """
        defaults = self._defaults
        defaults.defaults = [entry for entry in defaults.defaults if entry not in option.entries]
        defaults.overrides.known_choices[option.key] = None
        overrides = []
        for override in defaults.config_overrides:
            name = override.key_or_group
            if not _is_within(name, option.package):
                overrides.append(override)
            elif override.type in (OverrideType.CHANGE, OverrideType.ADD):
                overrides.append(dataclasses.replace(override, type=OverrideType.FORCE_ADD))
            elif not override.is_delete() or any(self._sets(entry, name) for entry in defaults.defaults):
                overrides.append(override)
        defaults.config_overrides = overrides

    def _entries_of(self, config_path: str, package: str) -> list[ResultDefault]:
        inside = [entry for entry in self._defaults.defaults if _is_within(entry.package or "", package)]
        parents = {entry.config_path: entry.parent for entry in inside}

        def chain(path: str | None) -> Iterator[str]:
            while path is not None:
                yield path
                path = parents.get(path)

        return [entry for entry in inside if config_path in chain(entry.config_path)]

    def _chosen_in(self, option: _Option) -> str | None:
        """Return the path of the file whose defaults list chooses the option."""
        metadata = self._defaults.overrides.override_metadata.get(option.key)
        if metadata is not None:
            return metadata.containing_config_path
        return next(entry.parent for entry in option.entries if entry.config_path == option.config_path)

    def _sets(self, entry: ResultDefault, setting: str) -> bool:
        """Whether a file of the defaults list sets a setting."""
        path = entry.config_path or ""
        if path not in self._contents:
            loaded = self._repo.load_config(path)  # which Hydra has already read
            assert loaded is not None
            self._contents[path] = OmegaConf.to_container(loaded.config, resolve=False)
        return _value_at(self._contents[path], entry.package or "", setting) is not None


def _conflict(option: _Option, naming: ResultDefault, chosen_in: str | None) -> str:
    """Return the message about an option over a class. chosen_in: the file that chooses it; None: the command line."""
    chosen = f"{option.key}={option.name}" if chosen_in is None else f"{chosen_in} chooses {option.key}={option.name}"
    return (
        f"{chosen}: {naming.config_path} sets {option.class_setting}, whose class would get this option's settings; "
        f"keep the class and drop the option, or use the option and remove {option.class_setting} there "
        f"('- override /{option.key}: {option.name}' in its defaults)"
    )


def _chooses(override: Override, option: _Option) -> bool:
    """Whether an override of the command line chooses an option of the group, or in a sweep any of several."""
    is_of_group = override.get_key_element().lstrip("+") == option.key
    return is_of_group and not any(isinstance(value, dict) for value in _values(override))


def _sets(override: Override, setting: str) -> bool:
    """Whether an override of the command line sets a setting, or in a sweep any of its values does."""
    if override.is_delete() or override.package is not None:
        return False
    return any(_value_at(value, override.key_or_group, setting) is not None for value in _values(override))


def _values(override: Override) -> list[Any]:
    value = override.value()
    return list(value.list) if isinstance(value, ChoiceSweep) else [value]


def _value_at(content: Any, package: str, setting: str) -> Any:
    """Return the value that `content`, as the value of the section `package`, gives a setting; None if it has none."""
    if not _is_within(setting, package):
        return None
    inner = setting.removeprefix(package).lstrip(".")
    for key in inner.split(".") if inner else ():
        content = content.get(key) if isinstance(content, dict) else None
    return content


def _is_within(setting: str, package: str) -> bool:
    """Whether a setting is a section or within it. "" is the whole configuration."""
    return not package or f"{setting}.".startswith(f"{package}.")
