"""What `_target_` may name: only allowed packages, only names defined in them, only arguments that fit."""

import copy
import functools
import pickle

import pytest
import torch

from trainapp.config import arguments, targets
from trainapp.errors import UserError
from trainapp.models.mlp import MLP


def test_locate_finds_classes_and_functions():
    assert targets.locate("trainapp.models.mlp.MLP", "model._target_", []) is MLP
    assert targets.locate("torch.optim.AdamW", "optimizer._target_", []) is torch.optim.AdamW
    assert targets.locate("torch.nn.Linear", "model._target_", []) is torch.nn.Linear


@pytest.mark.parametrize(
    "name",
    [
        "os.system",
        "builtins.eval",
        "torch.load",
        "torch.hub.load",
        "torchevil.Net",
        "torch.optimism.Net",
        "trainapp.run.runner.run",
        # Names that a module of an allowed package merely imports do not belong to it.
        "trainapp.data.sets.hf.Path",
        "trainapp.data.sets.text.UserError",
        "torch.optim.lr_scheduler.partial",
        "torch.nn.modules.module.OrderedDict",
    ],
)
def test_outside_the_allow_list(name):
    with pytest.raises(UserError, match=r"model\._target_=.*not among the packages that may be named here"):
        targets.locate(name, "model._target_", [])


def test_a_name_without_a_module():
    """Also of an allowed package, which is no class itself."""
    with pytest.raises(UserError, match=r"model\._target_=mine: must be the dotted name of a class or function"):
        targets.locate("mine", "model._target_", ["mine"])


@pytest.mark.parametrize("name", ["trainapp.run.runner.run", "trainapp.data.sets.text.UserError", "trainapp.model.MLP"])
def test_what_is_trainapps_is_nobodys_to_allow(name):
    with pytest.raises(UserError, match=r"\(trainapp\.models, trainapp\.data, .*\); its other modules") as refused:
        targets.locate(name, "model._target_", [])
    assert "user_packages" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("trainapp.models.mlp.MPL", r"trainapp\.models\.mlp has no class or function MPL; did you mean 'MLP'\?"),
        ("trainapp.models.nope.Net", r"importing trainapp\.models\.nope failed: No module named"),
        ("trainapp.data.sets.text.os.system", r"importing trainapp\.data\.sets\.text\.os failed"),
        ("torch.nn.modules", r"has no class or function modules|not among"),
    ],
)
def test_what_is_not_there(name, message):
    with pytest.raises(UserError, match=message):
        targets.locate(name, "model._target_", [])


def test_user_packages_allow_their_own_and_no_more(tmp_path, monkeypatch):
    (tmp_path / "mine_for_targets.py").write_text(
        "import functools, os\nfrom os import getcwd\nclass Net: pass\n"
        "own = functools.partial(functools.partial(Net))\nother = functools.partial(os.getcwd)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    name = "mine_for_targets.Net"
    with pytest.raises(UserError, match=r"allow it with 'user_packages=\[mine_for_targets\]'"):
        targets.locate(name, "model._target_", [])
    assert targets.locate(name, "model._target_", ["mine_for_targets"]).__name__ == "Net"
    assert type(targets.locate("mine_for_targets.own", "model._target_", ["mine_for_targets"])()).__name__ == "Net"
    for name in ("getcwd", "other"):
        with pytest.raises(UserError, match=r"is defined in \w+, not among"):
            targets.locate(f"mine_for_targets.{name}", "model._target_", ["mine_for_targets"])
    with pytest.raises(UserError, match="not among"):
        targets.locate("mine_for_targets_too.Net", "model._target_", ["mine_for_targets"])


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """A user's package that re-exports a model of a library which is no user package."""
    (tmp_path / "mine_with_imports").mkdir()
    (tmp_path / "mine_with_imports/__init__.py").write_text(
        "import functools, os\nfrom library_of_nets.nets import Net, build\nwide = functools.partial(Net, width=4)\n"
        "from torch import load\nfrom torch.hub import load as load_hub\n"
        "from subprocess import Popen\nfrom os import system\n"
        "from trainapp.run.runner import run\nno_module = type('NoModule', (), {})\nno_module.__module__ = None\n"
    )
    (tmp_path / "library_of_nets").mkdir()
    (tmp_path / "library_of_nets/__init__.py").write_text("")
    (tmp_path / "library_of_nets/nets.py").write_text(
        "class Net:\n    def __init__(self, width=2):\n        self.width = width\n\ndef build():\n    return Net()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.parametrize("name", ["Net", "build", "wide"])
def test_what_a_users_package_re_exports_is_the_users(packages, name):
    located = targets.locate(f"mine_with_imports.{name}", "model._target_", ["other", "mine_with_imports"])
    assert located().width == (4 if name == "wide" else 2)


@pytest.mark.parametrize("name", ["load", "load_hub", "Popen", "system", "run", "no_module"])
def test_what_torch_trainapp_and_python_define_is_not(packages, name):
    with pytest.raises(UserError, match=r"is defined in [\w. ]+, not among the packages") as refused:
        targets.locate(f"mine_with_imports.{name}", "model._target_", ["mine_with_imports"])
    has_other_remedy = name in ("Popen", "system", "no_module")
    assert has_other_remedy == str(refused.value).endswith("; define a function or class of your own that uses it")


@pytest.mark.parametrize("allowed", ["trainapp", "torch"])
def test_listing_torch_or_trainapp_opens_no_module_that_they_import(allowed):
    name = {"trainapp": "trainapp.files.Path", "torch": "torch.serialization.Any"}[allowed]
    with pytest.raises(UserError, match=r"is defined in \w+, not among|has no class or function"):
        targets.locate(name, "model._target_", [allowed])


def test_a_re_export_of_a_package_that_is_not_listed_is_refused_with_the_whole_list(packages):
    with pytest.raises(UserError, match=r"allow it with 'user_packages=\[own_losses,own_data,library_of_nets\]'$"):
        targets.locate("library_of_nets.nets.Net", "model._target_", ["own_losses", "own_data"])


def construct(arguments, provided=None, user_packages=()):
    provided = {"image_shape": (1, 8, 8), "num_classes": 10} if provided is None else provided
    return targets.construct(MLP, arguments, "model", user_packages, provided)


def test_construct_fills_in_what_is_provided_and_lets_the_arguments_win():
    model = construct({"width": 4, "num_classes": 3})
    assert model(torch.zeros(2, 1, 8, 8)).shape == (2, 3)
    assert construct({"width": 4, "num_classes": None})(torch.zeros(2, 1, 8, 8)).shape == (2, 10)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"widht": 4}, r"model\.widht: no such setting; did you mean 'width'\?"),
        ({"width": -1}, r"model\.width=-1: must be greater than 0"),
        ({"width": "4"}, r"model\.width=4: must be a valid integer"),
        ({"dropout": 1.0}, r"model\.dropout=1\.0: must be less than 1"),
    ],
)
def test_arguments_that_do_not_fit(arguments, message):
    with pytest.raises(UserError, match=message):
        construct(arguments)


def test_null_fits_where_it_is_the_default():
    """As people write `size: int = None`."""

    def resized(size: int = None):  # noqa: RUF013
        return size

    assert arguments.check_arguments(resized, {"size": None}, "data") == []
    assert arguments.check_arguments(resized, {"size": "x"}, "data") != []


def test_every_wrong_argument_is_named():
    with pytest.raises(UserError) as refused:
        construct({"width": -1, "depth": 0})
    assert [line.partition("=")[0] for line in str(refused.value).splitlines()] == ["model.width", "model.depth"]


def open_ended(**settings):
    return settings


@pytest.mark.parametrize(
    "node",
    [
        {"_target_": "os.getcwd"},
        [[{"deep": [{"_target_": "os.getcwd"}]}]],
        {"_target_": "torch.nn.Linear", "in_features": {"_target_": "os.getcwd"}, "out_features": 1},
    ],
)
def test_nested_target_outside_the_allow_list_is_not_called(node):
    with pytest.raises(UserError, match=r"_target_=os\.getcwd: not among the packages"):
        targets.construct(open_ended, {"part": node}, "model", [])


LINEAR = {"_target_": "torch.nn.Linear", "in_features": 2, "out_features": 3}


@pytest.mark.parametrize(
    ("node", "find"),
    [
        ({"deep": {"deeper": LINEAR}}, lambda built: built["deep"]["deeper"]),
        ([{"list": [1, LINEAR]}], lambda built: built[0]["list"][1]),
        ({"_target_": "torch.nn.Sequential", "_args_": [LINEAR]}, lambda built: built[0]),
        ({"_target_": "torch.nn.ModuleList", "modules": [LINEAR]}, lambda built: built[0]),
        ({**LINEAR, "_partial_": True, "out_features": 1}, lambda built: built(out_features=3)),
    ],
)
def test_nested_targets_are_built_wherever_they_are(node, find):
    layer = find(targets.construct(open_ended, {"part": node}, "model", [])["part"])
    assert type(layer) is torch.nn.Linear
    assert layer.weight.shape == (3, 2)


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({"_target_": ["torch.nn.Linear"]}, r"model\.part\._target_=\['torch\.nn\.Linear'\]: must be the dotted name"),
        ([{"_target_": None}], r"model\.part\.0\._target_=None: must be the dotted name"),
        ({"_target_": "torch.nn."}, r"must be the dotted name"),
        ([{**LINEAR, "in_feature": 2}], r"model\.part\.0\.in_feature: no such setting; did you mean 'in_features'"),
        ({**LINEAR, "out_features": "three"}, r"model\.part\.out_features=three: must be a valid integer"),
    ],
)
def test_a_nested_target_that_cannot_be_built_is_named(node, message):
    with pytest.raises(UserError, match=message):
        targets.construct(open_ended, {"part": node}, "model", [])


# --- sizes that the data determine


def sized(num_classes=3, width=2, **settings):
    """A part with its number of classes: the default is not the data's."""
    return {"num_classes": num_classes, "width": width, **settings}


def owner(part=None, num_classes=3):
    return part


SIZED = {"_target_": f"{__name__}.sized"}


def filled(part):
    """The part as `model.part` is built for data of ten classes, and the record of what was filled in."""
    spec = targets.Spec({"num_classes": 10, "vocab_size": 98})
    return targets.construct(owner, {"part": part}, "model", [__name__.partition(".")[0]], spec=spec), spec


@pytest.mark.parametrize(
    ("part", "find", "setting"),
    [
        (SIZED, lambda built: built, "model.part"),
        ({**SIZED, "num_classes": None}, lambda built: built, "model.part"),
        ([1, {"deep": [SIZED]}], lambda built: built[1]["deep"][0], "model.part.1.deep.0"),
        ({**SIZED, "child": SIZED}, lambda built: built["child"], "model.part.child"),
        ({**SIZED, "_args_": [], "width": 5}, lambda built: built, "model.part"),
        ({**SIZED, "_partial_": True}, lambda built: built(), "model.part"),
        ({**SIZED, "_partial_": True, "num_classes": None}, lambda built: built(width=5), "model.part"),
        ({"_target_": f"{__name__}.owner", "_args_": [SIZED]}, lambda built: built, "model.part._args_.0"),
    ],
)
def test_a_nested_target_gets_the_datas_sizes(part, find, setting):
    """Where the user has not set them: they are not its defaults. No other key of the spec goes into `**settings`."""
    built, spec = filled(part)
    assert find(built)["num_classes"] == 10
    assert "vocab_size" not in find(built)
    assert spec.filled[f"{setting}.num_classes"] == 10
    assert spec.filled["model.num_classes"] == 10
    assert spec.written == []


@pytest.mark.parametrize(
    "part",
    [{**SIZED, "num_classes": 7}, {**SIZED, "_args_": [7]}, {**SIZED, "_args_": [7], "_partial_": True}],
)
def test_what_the_user_has_set_stays(part):
    """Also by position, which a value by name would contradict. It is recorded, to be compared."""
    built, spec = filled(part)
    assert (built() if callable(built) else built)["num_classes"] == 7
    assert spec.filled == {"model.num_classes": 10}
    assert spec.written == [("model.part.num_classes", "num_classes", 7)]


def test_what_the_caller_of_a_partial_passes_stays():
    partial, spec = filled({**SIZED, "_partial_": True, "width": 5})
    assert partial(7) == partial(num_classes=7) == {"num_classes": 7, "width": 5}
    assert "model.part.num_classes" not in spec.filled
    assert pickle.loads(pickle.dumps(partial))() == copy.deepcopy(partial)() == {"num_classes": 10, "width": 5}


def test_a_partial_without_sizes_is_a_plain_one():
    """It may be called in each forward, also of a compiled model."""
    assert type(filled({**LINEAR, "_partial_": True})[0]) is functools.partial


def test_sizes_do_not_reach_nested_targets_of_anything_but_the_model():
    """Of a metric, say, which may have an average of its own."""
    provided, packages = {"num_classes": 10}, [__name__.partition(".")[0]]
    assert targets.construct(owner, {"part": SIZED}, "metrics.own", packages, provided)["num_classes"] == 3


def test_a_configuration_of_transformers_keeps_its_padding_token():
    """With one, an embedding gives that token, often the end of text, no gradient."""
    pytest.importorskip("transformers", reason="needs the extra trainapp[hf]")
    spec = targets.Spec({"vocab_size": 98, "pad_token_id": 5, "context_length": 8})
    part = {"_target_": "transformers.LlamaConfig", "num_hidden_layers": 1}
    built = targets.construct(owner, {"part": part}, "model", [], spec=spec)
    assert (built.vocab_size, built.pad_token_id) == (98, None)
    assert not hasattr(built, "context_length")
    assert spec.filled == {"model.part.vocab_size": 98}


def test_a_constructors_own_rule_names_the_group():
    def refuses(size=1):
        raise ValueError("size: too small")

    with pytest.raises(UserError, match=r"^model: size: too small$"):
        targets.construct(refuses, {}, "model", [])
