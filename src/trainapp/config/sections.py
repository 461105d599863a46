"""From what Hydra composed to the sections of the schema: arguments of classes apart from settings of the program."""

import dataclasses
import re
from typing import Any

from trainapp.config.schema import Loader, Model, Optimizer


def split(plain: dict[str, Any], errors: list[str]) -> dict[str, Any]:
    """The sections that name classes, in the layout of `Config`. plain: in that of conf/train.yaml. Mistakes are added
    to `errors`.
    """
    sections = _split_targets(plain, errors) | _named_targets(plain, errors)
    sections["eval"] = _eval_targets(plain.get("eval"), errors)
    sections |= _split_task(plain, "", errors)
    if isinstance(plain.get("updates"), list):
        sections["updates"] = [
            _split_update(update, plain.get("optimizer"), f"updates.{number}.", errors)
            for number, update in enumerate(plain["updates"])
        ]
    if isinstance(plain.get("schedule"), dict):
        sections["schedule"] = _split_schedule(plain["schedule"], errors)
    return sections


def _split_targets(plain: dict[str, Any], errors: list[str]) -> dict[str, Any]:
    """`data`, `model` and `optimizer` hold the application's own keys and their constructor's arguments."""
    own_keys: dict[str, Any] = {"data": Loader, "model": Model, "optimizer": Optimizer}
    sections: dict[str, Any] = {}
    for group, keys in own_keys.items():
        node = plain.get(group)
        if not isinstance(node, dict) or "_target_" not in node:
            errors.append(f"{group}: no {group} is chosen; choose one with {group}=NAME")
            sections[group] = {"target": "", "lr": 1.0} if group == "optimizer" else {"target": ""}
            continue
        names = {f.name for f in dataclasses.fields(keys)} - {"target", "arguments"}
        split = _split(node, names)
        if group == "data":
            sections["loader"] = {key: split.pop(key) for key in names & split.keys()}
        sections[group] = split
    sections.setdefault("loader", {})
    return sections


def _named_targets(plain: dict[str, Any], errors: list[str]) -> dict[str, Any]:
    """`metrics`, `callbacks` and `tracker` hold classes by names of the user's. `name: null` leaves one out."""
    sections: dict[str, Any] = {}
    for group in ("metrics", "callbacks", "tracker"):
        nodes = plain.get(group) or {}
        if not isinstance(nodes, dict):
            errors.append(f"{group}={nodes}: must be a mapping of names to classes, {{NAME: {{_target_: ...}}}}")
            nodes = {}
        sections[group] = {}
        for name, node in nodes.items():
            if node is None:
                continue
            if not re.fullmatch(r"\w[\w.-]*", str(name)):
                errors.append(f"{group}.{name}: a name may have letters, digits, `_`, `-` and `.`")
            elif not isinstance(node, dict) or not isinstance(node.get("_target_"), str):
                errors.append(f"{group}.{name}={node}: must have a `_target_`, the class to build")
            else:
                sections[group][str(name)] = _split(node, set())
    return sections


def _split(node: dict[str, Any], names: set[str]) -> dict[str, Any]:
    """Keys of these names stay, and all others are arguments of what `_target_` names."""
    own = {key: value for key, value in node.items() if key in names}
    arguments = {key: value for key, value in node.items() if key not in names and key != "_target_"}
    return own | {"target": node["_target_"], "arguments": arguments}


def _split_schedule(node: dict[str, Any], errors: list[str]) -> dict[str, Any]:
    """A shape with its settings, or a `_target_` with arguments."""
    if node.get("_target_") is not None:
        return _split(node, {"warmup"})
    errors += [
        f"schedule.{key}: no such setting; write schedule._target_" for key in ("target", "arguments") if key in node
    ]
    return {key: value for key, value in node.items() if key not in ("_target_", "target", "arguments")}


def _split_task(node: dict[str, Any], prefix: str, errors: list[str]) -> dict[str, Any]:
    """`task` of a node: a name, or a mapping of `_target_` and arguments."""
    if prefix and "task_arguments" in node:  # of the run itself, `compose` refuses it
        errors.append(
            f"{prefix}task_arguments: no such setting; write {prefix}task={{_target_: NAME, ARGUMENT: VALUE}}"
        )
    task = node.get("task")
    if not isinstance(task, dict):
        return {} if task is None else {"task": task, "task_arguments": {}}
    if not isinstance(task.get("_target_"), str):
        errors.append(f"{prefix}task={task}: must have a `_target_`, the function or class that computes the loss")
        return {"task": "auto", "task_arguments": {}}
    return {"task": task["_target_"], "task_arguments": {key: task[key] for key in task if key != "_target_"}}


def _split_update(update: Any, common: Any, prefix: str, errors: list[str]) -> Any:
    """One of `updates`. Its optimizer starts from `optimizer`, the common one, unless it names a class of its own."""
    if not isinstance(update, dict):
        return update
    update = update | _split_task(update, prefix, errors)
    own = update.get("optimizer") or {}
    if not isinstance(own, dict):
        return update
    inherited = {key: value for key, value in common.items() if key != "groups"} if isinstance(common, dict) else {}
    node = own if "_target_" in own else {**inherited, **own}
    if "_target_" not in node:
        return update
    names = {f.name for f in dataclasses.fields(Optimizer)} - {"target", "arguments"}
    return {**update, "optimizer": _split(node, names)}


def _eval_targets(node: Any, errors: list[str]) -> dict[str, Any]:
    """`eval` by name: each a data set, in the layout of `data` but without the settings that all data sets share."""
    if not isinstance(node, dict):
        if node is not None:
            errors.append(
                f"eval={node}: must be a mapping of names to data sets, such as {{hard: {{_target_: my.Set}}}}"
            )
        return {}
    shared, found = {f.name for f in dataclasses.fields(Loader)}, {}
    for name, child in node.items():
        if not isinstance(child, dict) or "_target_" not in child:
            errors.append(
                f"eval.{name}={child}: must be a data set with a _target_; give one, or choose a shipped one with "
                f"+data@eval.{name}=NAME"
            )
            continue
        both = sorted(shared & child.keys())
        errors += [f"eval.{name}.{key}: is set for all data sets together, by data.{key}" for key in both]
        found[name] = _split(child, set())
    return found
