"""A class in place of a group's option: `optimizer: {_target_: CLASS}` in a YAML file, or `optimizer._target_=CLASS` on
the command line.

Hydra merges it over the group's default option, whose settings belong to another class: NAdam would decay its weights
as AdamW does, and SGD be given AdamW's betas. Here such an option is left out of the defaults list. What stays are the
settings common to the group (in conf/train.yaml) and all that the user wrote; what is unset is the class's own default.
An option that is chosen beside the class, in the same file's defaults list or on the command line, keeps its settings.

So begins a class that a file names over the files before it, such as an experiment over the one from which it derives:
what they write for the group's option or for another class is left out of them. Settings of the program, such as
`optimizer.lr` and `model.freeze`, stay. `optimizer._target_=CLASS` on the command line changes the class alone.

Hydra has no hook between the defaults list and the merge, so `install` replaces the function that makes the list, which
is the same in Hydra 1.3.8 and 1.4.0rc3. All compositions pass through it: runs, a sweep's jobs, --cfg and --info.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra._internal import config_loader_impl, defaults_list
from hydra._internal.config_repository import IConfigRepository
from hydra._internal.defaults_list import DefaultsList
from hydra.core.default_element import ResultDefault
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override, OverrideType
from hydra.errors import ConfigCompositionException
from omegaconf import DictConfig, OmegaConf, open_dict

from trainapp.config.schema import Data, Model, Optimizer, setting_names
from trainapp.files import CONF

GROUPS = ("data", "model", "optimizer", "schedule")
_GROUPS_OF_SECTIONS = ("eval", "metrics", "callbacks", "tracker")  # each of them names classes by name
# By section, the settings that are no arguments of its class.
_SETTINGS = {"data": setting_names(Data), "model": setting_names(Model), "optimizer": setting_names(Optimizer)}
# The settings of the sections that a class beside them may claim, see `claimed_settings`.
_CLAIMABLE = [f"{section}.{name}" for section, names in _SETTINGS.items() for name in sorted(names)]
WRITTEN = "written_by_user"  # the key of those that a composed configuration names
_MARK = "hydra/trainapp"  # a configuration that other programs with Hydra do not have


def install() -> None:
    """Let Hydra compose by this rule in this process, except for other programs. Raises AttributeError if this version
    of Hydra lacks the function.
    """
    loader: Any = config_loader_impl
    if loader.create_defaults_list is not _create_defaults_list:
        loader.create_defaults_list = _create_defaults_list


def _create_defaults_list(
    repo: IConfigRepository, config_name: str | None, overrides_list: list[Override], **flags: bool
) -> DefaultsList:
    """Return the result of Hydra's `create_defaults_list`, without options that a class replaces."""
    defaults = defaults_list.create_defaults_list(
        repo=repo, config_name=config_name, overrides_list=overrides_list, **flags
    )
    if not repo.config_exists(_MARK):
        return defaults
    composition = _Composition(repo, defaults, overrides_list)

    # First a class over the class of another file, then a class over an option.
    for section in composition.sections():
        composition.leave_out_other_classes(section)
    for option in composition.options():
        if composition.is_replaced(option):
            composition.leave_out(option)
    composition.note_written_settings()
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
        self._repo = repo
        self._defaults = defaults
        self._overrides = overrides
        self._contents: dict[str, Any] = {}  # by path; plain containers

    def sections(self) -> list[str]:
        """Return the sections of the configuration that name a class."""
        sections = [*GROUPS, "task"]
        for group in _GROUPS_OF_SECTIONS:
            names: dict[str, None] = {}
            for entry in self._files_for_all():
                content = self._value_in(entry, group)
                if isinstance(content, dict):
                    names.update(dict.fromkeys(content))
            sections.extend(f"{group}.{name}" for name in names)
        return sections

    def _files_for_all(self) -> list[ResultDefault]:
        """Return the entries that are no options of a group, but for the whole configuration, such as experiments."""
        return [entry for entry in self._defaults.defaults if not entry.package]

    def leave_out_other_classes(self, section: str) -> None:
        """Leave out of the files what they write for a section before the last class that a file names for it."""
        files = self._files_for_all()

        # Where the last class begins: later files that name it again, or none, add to it.
        last_class = None
        first_of_class = 0  # the position of the file that names it first
        for position, entry in enumerate(files):
            named_class = self._class_in(entry, section)
            if named_class not in (None, last_class):
                last_class = named_class
                first_of_class = position

        # Settings of the program stay: they apply to any class.
        settings_to_keep = {"_target_", *_SETTINGS.get(section, ())}
        has_removed = False
        for entry in files[:first_of_class]:
            if self._remove_settings(entry, section, settings_to_keep):
                has_removed = True
        if has_removed:
            self._let_overrides_add(section)

    def _class_in(self, entry: ResultDefault, section: str) -> Any:
        """Return the class that a file names for a section, or None; `task` may be the name itself."""
        content = self._value_in(entry, section)
        if isinstance(content, dict):
            return content.get("_target_")
        return content if section == "task" else None

    def _remove_settings(self, entry: ResultDefault, section: str, settings_to_keep: set[str]) -> bool:
        """Remove a section's settings, but for those to be kept, from a file as Hydra has read it. Return whether there
        were any.
        """
        content = self._value_in(entry, section)
        if not isinstance(content, dict):
            return False
        names = [name for name in content if name not in settings_to_keep]

        # From the node that Hydra will merge, of which `content` is a copy.
        node = OmegaConf.select(self._load(entry), section)
        assert isinstance(node, DictConfig)
        with open_dict(node):
            for name in names:
                del node[name]
        del self._contents[entry.config_path or ""]
        return bool(names)

    def options(self) -> list[_Option]:
        """Return the chosen options of the groups that name classes. One for the whole configuration
        (`@package _global_`) is not among them: it is like an experiment.
        """
        options = []
        for key, name in self._defaults.overrides.known_choices.items():
            group, _, package = key.partition("@")
            if group not in GROUPS or name is None:
                continue
            section = package or group
            config_path = f"{group}/{name}"
            entries = self._entries_of(config_path, section)
            if entries:
                options.append(_Option(key, section, config_path, entries))
        return options

    def _entries_of(self, config_path: str, section: str) -> list[ResultDefault]:
        """Return an option's entries in the defaults list: its own, and those that its file's defaults list adds."""
        in_section = [entry for entry in self._defaults.defaults if _is_within(entry.package or "", section)]
        parents = {entry.config_path: entry.parent for entry in in_section}
        return [entry for entry in in_section if _is_added_by(config_path, entry.config_path, parents)]

    def is_replaced(self, option: _Option) -> bool:
        """Return whether a class is named after the option, and the option was not chosen beside it. Raises
        ConfigCompositionException for an option that is chosen over the class of a file: on the command line, or in a
        later file.
        """
        # A class on the command line replaces the option, unless that is chosen there, too.
        option_is_on_command_line = any(_override_chooses(override, option) for override in self._overrides)
        class_is_on_command_line = any(_override_sets(override, option.class_setting) for override in self._overrides)
        if class_is_on_command_line:
            return not option_is_on_command_line

        # A class in a file replaces it, unless the same file chooses it. Choosing it later is an error.
        class_file = self._last_file_naming_a_class(option)
        if class_file is None:
            return False
        if option_is_on_command_line:
            raise ConfigCompositionException(_conflict(option, class_file, chosen_in=None))
        chosen_in = self._file_choosing(option)
        if self._is_after(chosen_in, class_file):
            raise ConfigCompositionException(_conflict(option, class_file, chosen_in))
        return class_file.config_path != chosen_in

    def _last_file_naming_a_class(self, option: _Option) -> ResultDefault | None:
        """Return the last file behind the option in the defaults list that sets the class of its group, or None."""
        entries = self._defaults.defaults
        last_position = max(entries.index(entry) for entry in option.entries)
        entries_behind = entries[last_position + 1 :]
        for entry in reversed(entries_behind):
            if self._file_sets(entry, option.class_setting):
                return entry
        return None

    def _file_choosing(self, option: _Option) -> str | None:
        """Return the path of the file whose defaults list chooses the option."""
        metadata = self._defaults.overrides.override_metadata.get(option.key)
        if metadata is not None:
            return metadata.containing_config_path
        return next(entry.parent for entry in option.entries if entry.config_path == option.config_path)

    def _is_after(self, config_path: str | None, entry: ResultDefault) -> bool:
        """Return whether a file comes after an entry in the defaults list."""
        entries = self._defaults.defaults
        later_entries = entries[entries.index(entry) + 1 :]
        return any(later.config_path == config_path for later in later_entries)

    def leave_out(self, option: _Option) -> None:
        """Compose without the option."""
        defaults = self._defaults
        defaults.defaults = [entry for entry in defaults.defaults if entry not in option.entries]
        defaults.overrides.known_choices[option.key] = None
        self._let_overrides_add(option.package)

    def _let_overrides_add(self, section: str) -> None:
        """Let overrides of a section add what was left out, as if each had a `++`; they need not remove it."""
        overrides = []
        for override in self._defaults.config_overrides:
            if not _is_within(override.key_or_group, section):
                overrides.append(override)
            elif override.type in (OverrideType.CHANGE, OverrideType.ADD):
                overrides.append(dataclasses.replace(override, type=OverrideType.FORCE_ADD))
            elif override.is_delete() and not self._some_file_sets(override.key_or_group):
                continue  # Hydra refuses to remove a setting that does not exist
            else:
                overrides.append(override)
        self._defaults.config_overrides = overrides

    def note_written_settings(self) -> None:
        """Compose also WRITTEN: the settings beside a class that the user's files, or overrides of a whole section,
        write. Once composed, a value that equals the default would look like the default.
        """
        written = [setting for setting in _CLAIMABLE if self._user_writes(setting)]
        if written:
            text = f"++{WRITTEN}=[{','.join(written)}]"
            self._defaults.config_overrides.extend(OverridesParser.create().parse_overrides([text]))

    def _user_writes(self, setting: str) -> bool:
        """Return whether a file other than the program's, or an override, writes a setting."""
        section, _, name = setting.rpartition(".")
        sections = []
        for entry in self._defaults.defaults:
            if not self._is_of_program(entry):
                sections.append(self._value_in(entry, section))
        for override in self._overrides:
            if not override.is_delete() and override.package is None:
                sections.extend(_value_at(value, override.key_or_group, section) for value in _values(override))
        return any(isinstance(content, dict) and name in content for content in sections)

    def _is_of_program(self, entry: ResultDefault) -> bool:
        """Return whether a file is one of the program's: those of `conf/`, and Hydra's own."""
        if entry.config_path is None:
            return True
        loaded = self._repo.load_config(entry.config_path)
        assert loaded is not None
        if loaded.provider == "hydra":
            return True
        return Path(loaded.path.removeprefix("file://")).is_relative_to(CONF)

    def _some_file_sets(self, setting: str) -> bool:
        return any(self._file_sets(entry, setting) for entry in self._defaults.defaults)

    def _file_sets(self, entry: ResultDefault, setting: str) -> bool:
        """Return whether a file of the defaults list sets a setting."""
        return self._value_in(entry, setting) is not None

    def _value_in(self, entry: ResultDefault, setting: str) -> Any:
        """Return the value that a file of the defaults list gives a setting; None if it gives none."""
        path = entry.config_path or ""
        if path not in self._contents:
            self._contents[path] = OmegaConf.to_container(self._load(entry), resolve=False)
        return _value_at(self._contents[path], entry.package or "", setting)

    def _load(self, entry: ResultDefault) -> Any:
        """Return the configuration in a file, which Hydra has already read and will merge."""
        loaded = self._repo.load_config(entry.config_path or "")
        assert loaded is not None
        return loaded.config


def _is_added_by(option_path: str, config_path: str | None, parents: dict[str | None, str | None]) -> bool:
    """Return whether a file is that of the option, or is in its defaults list, or in that of such a file.

    Args:
        option_path: the path of the option's file.
        config_path: the path of the file.
        parents: by the path of each file, that of the file whose defaults list contains it.
    """
    while config_path is not None:
        if config_path == option_path:
            return True
        config_path = parents.get(config_path)
    return False


def _override_chooses(override: Override, option: _Option) -> bool:
    """Return whether an override of the command line chooses an option of the group, or in a sweep any of several."""
    is_of_group = override.get_key_element().lstrip("+") == option.key
    return is_of_group and not any(isinstance(value, dict) for value in _values(override))


def _override_sets(override: Override, setting: str) -> bool:
    """Return whether an override of the command line sets a setting, or in a sweep any of its values does."""
    if override.is_delete() or override.package is not None:
        return False
    return any(_value_at(value, override.key_or_group, setting) is not None for value in _values(override))


def _values(override: Override) -> list[Any]:
    """Return the override's value, or those that it tries in a sweep."""
    value = override.value()
    return list(value.list) if isinstance(value, ChoiceSweep) else [value]


def _conflict(option: _Option, class_file: ResultDefault, chosen_in: str | None) -> str:
    """Return the message about an option that is chosen over a class.

    Args:
        option: the option.
        class_file: sets the class.
        chosen_in: the file that chooses the option; None: the command line does.
    """
    choice = f"{option.key}={option.name}"
    if chosen_in is not None:
        choice = f"{chosen_in} chooses {choice}"
    return (
        f"{choice}: {class_file.config_path} sets {option.class_setting}, whose class would get this option's "
        f"settings; keep the class and drop the option, or use the option and remove {option.class_setting} there "
        f"('- override /{option.key}: {option.name}' in its defaults)"
    )


def _value_at(content: Any, section: str, setting: str) -> Any:
    """Return the value that a setting has if the section has this content; None if the content does not set it."""
    if not _is_within(setting, section):
        return None
    path_in_section = setting.removeprefix(section).lstrip(".")
    if not path_in_section:
        return content
    for key in path_in_section.split("."):
        if not isinstance(content, dict):
            return None
        content = content.get(key)
    return content


def _is_within(setting: str, section: str) -> bool:
    """Return whether a setting is a section or within it. "" is the whole configuration."""
    return not section or f"{setting}.".startswith(f"{section}.")
