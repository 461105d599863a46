"""Every option of every config group composes, is built, and trains."""

import json
import math

import hf_files
import image_folders
import pytest
import runs
import torch
from helpers import ROOT, evaluations, incidents, metrics, result, run_cli, train
from runs import MODELS

GROUPS = {
    folder.name: sorted(path.stem for path in folder.glob("*.yaml"))
    for folder in sorted((ROOT / "conf").iterdir())
    if folder.is_dir()
}
SECONDS = {("activation_checkpointing", "auto"), ("tracker", "wandb"), ("tracker", "mlflow")}
IN_PROCESS = [
    pytest.param(group, option, marks=pytest.mark.slow if (group, option) in SECONDS else ())
    for group, options in GROUPS.items()
    for option in options
    if group != "parallel"
]
# What an option needs to be quick or to be valid. All others train an mlp on the digits.
BESIDE = {
    ("model", "resnet"): MODELS["resnet"][1:],
    ("model", "gpt"): MODELS["gpt"][1:],
    ("model", "hf"): (*hf_files.CAUSAL[1:], *MODELS["gpt"][6:], "data.context_length=16"),
    ("data", "hf"): (*MODELS["gpt"][:6], "data.vocab_size=300"),
    ("data", "sft"): (*MODELS["gpt"][:6], "data.context_length=16"),
    ("data", "text"): MODELS["gpt"][:6],
    ("data", "synthetic_tokens"): MODELS["gpt"][:6],
    ("data", "synthetic_images"): (*MODELS["mlp"][:2], "data.size=100", "data.val_size=20"),
    ("data", "images"): (*MODELS["mlp"][:2], "data.image_size=8", "data.num_workers=0"),
    ("model", "vit"): ("model.depth=1", "model.width=16", "model.heads=2", "model.patch_size=4"),
    ("activation_checkpointing", "auto"): MODELS["gpt"],
    ("activation_checkpointing", "full"): MODELS["gpt"],
    ("activation_checkpointing", "selective"): MODELS["gpt"],
    ("precision", "bf16_pure"): (*MODELS["mlp"], "optimizer=adamw_bf16"),
    ("precision", "int8"): MODELS["gpt"],
    ("precision", "fp8"): MODELS["gpt"],
    ("experiment", "gpt_text"): ("model.depth=1", "model.width=16", "model.heads=2"),
}


def choose(group, option):
    return (f"{group}={option}", *BESIDE.get((group, option), () if group == "experiment" else MODELS["mlp"]))


def skip_without_package(option):
    packages = {"torchao": ("int8", "fp8"), "datasets": ("hf", "sft"), "peft": ("lora",), "wandb": ("wandb",)}
    for package, options in (packages | {"mlflow": ("mlflow",)}).items():
        if option in options:
            pytest.importorskip(package, reason="needs an extra")


def with_files(tmp_path, group, option):
    """What the data of an option are read from."""
    if (group, option) == ("data", "hf"):
        return (f"data.path={hf_files.texts(tmp_path / 'texts.jsonl')}",)
    if (group, option) == ("data", "sft"):
        folder = hf_files.tokenizer_folder(tmp_path / "tokenizer")
        return (f"data.files={hf_files.examples(tmp_path / 'chat.jsonl')}", f"data.tokenizer={folder}")
    return ()


@pytest.mark.parametrize(("group", "option"), IN_PROCESS)
def test_option_trains(tmp_path, group, option):
    skip_without_package(option)
    overrides = choose(group, option) + with_files(tmp_path, group, option)
    if "data=text" in overrides or group == "experiment":
        (tmp_path / "a.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
        overrides += (f"data.files={tmp_path / 'a.txt'}",)
    if group == "data" and option != "text":
        overrides = tuple(o for o in overrides if not o.startswith("data="))
        overrides = (f"data={option}", *overrides)
    if option == "images":
        overrides += (f"data.path={image_folders.fill(tmp_path / 'images', 8)}",)
    ended = runs.run(tmp_path, *dict.fromkeys(overrides), "train.max_steps=2", "every.eval=2")
    lines = metrics(tmp_path)
    assert [line["step"] for line in lines] == [1, 2]
    assert ended.steps == 2
    assert all(0 < line["loss"] < 10 for line in lines)
    assert all(line["grad_norm"] > 0 for line in lines)
    assert ended.objective == evaluations(tmp_path)[-1][ended.metric]


def test_this_walk_sees_the_groups_that_the_root_lists():
    root = (ROOT / "conf/train.yaml").read_text().partition("defaults:")[2].partition("\n\n")[0]
    listed = {line.strip(" -").partition(":")[0] for line in root.splitlines() if ":" in line}
    assert set(GROUPS) == {name for name in listed if not name.startswith("optional")}
    assert all(GROUPS.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    "option", [pytest.param(o, marks=pytest.mark.slow) if o in ("fsdp", "hsdp") else o for o in GROUPS["parallel"]]
)
def test_parallel_option_trains_a_step(tmp_path, option):
    ranks = 1 if option == "single" else 2
    devices = () if option == "single" else (f"parallel.devices={ranks}",)
    train(
        tmp_path / "run", f"parallel={option}", *devices, *MODELS["mlp"], *runs.TINY, "train.max_steps=1", timeout=200
    )
    (line,) = metrics(tmp_path / "run")
    assert line["step"] == 1
    assert 0 < line["loss"] < 10


# What the options do


# LBFGS needs to call the model again, SparseAdam needs sparse gradients, Muon takes only matrices.
UNSUITED = ("Optimizer", "LBFGS", "SparseAdam", "Muon")
OPTIMIZERS = sorted(
    name
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and name not in UNSUITED
)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_torch_optimizer_by_its_name(tmp_path, name):
    arguments = [f"~optimizer.{key}" for key in ("betas", "eps")]
    run = runs.prepare(tmp_path, *MODELS["mlp"], f"optimizer._target_=torch.optim.{name}", *arguments)
    before = runs.weights(run.state.model)
    try:
        assert type(run.state.optimizer).__name__ == name
        for _ in range(2):
            runs.loop.train_step(run)
    finally:
        run.tracker.close()
    change = (runs.weights(run.state.model) - before).abs().max()
    assert run.state.progress.step == 2
    assert 0 < change < 1


@pytest.mark.parametrize(
    ("shape", "factors"),
    [
        # 10 steps, a warm-up of 2, down to a tenth at the end: the multipliers of the rate, worked out by hand.
        ("constant", [0.5, 1, 1, 1, 1, 1, 1, 1, 1, 1]),
        ("linear", [0.5, 1] + [1 - 0.9 * k / 8 for k in range(8)]),
        ("cosine", [0.5, 1] + [0.1 + 0.45 * (1 + math.cos(math.pi * k / 8)) for k in range(8)]),
        ("wsd", [0.5, 1, 1, 1, 1, 1, 1, 1, 1, 1 - 0.9 * 0.5**0.5]),
    ],
)
def test_rates_of_every_schedule(tmp_path, shape, factors):
    settings = ("schedule.warmup=2", "+schedule.final=0.1" if shape == "constant" else "schedule.final=0.1")
    runs.run(tmp_path, *MODELS["mlp"], f"schedule={shape}", *settings, "train.max_steps=10", "optimizer.lr=0.01")
    assert [line["lr"] for line in metrics(tmp_path)] == pytest.approx([0.01 * f for f in factors], rel=1e-12)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], (10, 1)),
        (["batch.micro_size=4"], (4, 3)),  # 4, 4, 2
        (["accumulation=fixed", "accumulation.steps=3"], (4, 3)),  # 4, 4, 2
        (["accumulation=fixed"], (3, 4)),  # 3, 3, 2, 2
    ],
)
def test_accumulation_fixed_and_auto(tmp_path, overrides, expected):
    ended = runs.run(tmp_path, *MODELS["mlp"], "train.max_steps=1", "batch.global_size=10", *overrides)
    assert (ended.micro_size, ended.accumulation) == expected


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_compiled_model_learns_as_the_plain_one(tmp_path, model):
    overrides = (*MODELS[model], "train.max_steps=2", "every.eval=2")
    if model == "gpt":
        overrides += ("model.dropout=0",)  # compiled dropout draws different random numbers
    torch.compiler.reset()
    for name in ("false", "true"):
        runs.run(tmp_path / name, *overrides, f"train.compile={name}")
    plain, compiled = ([line["loss"] for line in metrics(tmp_path / name)] for name in ("false", "true"))
    assert compiled == pytest.approx(plain, rel=1e-4)


def test_checkpointing_off_writes_none(tmp_path):
    for option, exists in (("standard", True), ("off", False)):
        ended = runs.run(tmp_path / option, *MODELS["mlp"], f"checkpointing={option}", "train.max_steps=1")
        assert (tmp_path / option / "checkpoints").exists() is exists
        assert (ended.checkpoint is not None) is exists
        assert json.loads((tmp_path / option / "result.json").read_text())["checkpoint"] == ended.checkpoint


# 512 samples at once need 3.1 MiB, of which 1.3 do not depend on the micro-batch.
SCARCE = ("model=mlp", "data=digits", "batch.global_size=512", "memory.limit=2.5MiB", "train.max_steps=2")


@pytest.mark.slow
def test_oom_restart_recovers_and_off_lets_the_error_through(tmp_path):
    ended = runs.run(tmp_path / "restart", *SCARCE, "oom=restart")
    assert ended.steps == 2
    assert ended.oom_restarts == len(incidents(tmp_path / "restart")) > 0
    assert result(tmp_path / "restart")["micro_size"] == ended.micro_size < 512
    with pytest.raises(torch.OutOfMemoryError, match=r"memory\.limit"):
        runs.run(tmp_path / "off", *SCARCE, "oom=off")


@pytest.mark.slow
def test_debug_fast_goes_through_everything(tmp_path):
    train(tmp_path / "run", "debug=fast", *MODELS["mlp"])
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 2, 3, 4]
    assert [line["step"] for line in evaluations(tmp_path / "run")] == [2, 4]
    assert {path.name for path in (tmp_path / "run/checkpoints").glob("step_*")} == {"step_00000002", "step_00000004"}


@pytest.mark.slow
def test_debug_nonfinite_names_the_operation_behind_a_non_finite_value(tmp_path):
    (tmp_path / "bad.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.linear = nn.Linear(64, 10)\n"
        "    def forward(self, images):\n"
        "        shifted = self.linear(images.flatten(1)) * 0\n"
        "        return shifted.sqrt()  # finite; its gradient is infinite, and times 0 that is nan\n"
    )
    (tmp_path / "model").mkdir()
    (tmp_path / "model/bad.yaml").write_text("_target_: bad.Net\n")
    user = ("--config-dir=.", "model=bad", "user_packages=[bad]", "train.max_steps=1")
    plain = run_cli(*user, cwd=tmp_path)
    assert plain.returncode == 1
    assert "shifted = self.linear" not in plain.stderr
    traced = run_cli(*user, "debug=nonfinite", cwd=tmp_path)
    assert traced.returncode == 1
    assert "MulBackward0" in traced.stderr
    assert "shifted = self.linear(images.flatten(1)) * 0" in traced.stderr


def test_interpolation_on_the_command_line(tmp_path):
    config = runs.configure(tmp_path, "model=mlp", "model.width=${batch.global_size}", "batch.global_size=24")
    assert config.model.arguments["width"] == 24
