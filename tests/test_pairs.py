"""Every pair of shipped options trains three steps with the default settings, or is refused with one message.

The pairs are covered by few runs, each with one option of every group: a covering array, computed greedily. Options are
read from `conf/`, so that a new one joins by itself.
"""

import itertools
import re
import shutil

import hf_files
import image_folders
import pytest
import runs
from helpers import ROOT, metrics, result, run_cli

from trainapp.config import compose
from trainapp.config.schema import Config
from trainapp.errors import UserError
from trainapp.launch import worker
from trainapp.run import runner

QUICKEST = ("parallel=single", "activation_checkpointing=none")  # first: they fill rows that need no other
# Extras, whose rows would be skipped without them: tests/tracking/test_loggers.py.
SERVICES = ("wandb", "mlflow", "trackio")
GROUPS = {
    folder.name: tuple(
        sorted(
            (f"{folder.name}={path.stem}" for path in folder.glob("*.yaml") if path.stem not in SERVICES),
            key=lambda option: (option not in QUICKEST, option),
        )
    )
    for folder in sorted((ROOT / "conf").iterdir())
    if folder.is_dir()
}
# Groups whose default is to choose none of their options; `~` before an option stands for that.
OPTIONAL = {group: (f"~{group}", *GROUPS[group]) for group in ("callbacks", "debug", "experiment")}
SWITCHES = {
    "compile": ("train.compile=false", "train.compile=true"),
    "workers": ("data.num_workers=auto", "data.num_workers=1"),
    "average": ("train.ema=null", "train.ema=0.9"),
    "init": ("model.init_from=null", "model.init_from=weights.safetensors"),
    "micro": ("batch.micro_size=auto", "batch.micro_size=3"),
    "limit": ("memory.limit=null", "memory.limit=1GiB"),
    "nonfinite": ("train.nonfinite=stop", "train.nonfinite=skip"),
    "in_backward": ("optimizer.in_backward=false", "optimizer.in_backward=true"),
}
FACTORS = GROUPS | OPTIONAL | SWITCHES
WITHOUT_COMPILER = FACTORS | {"compile": SWITCHES["compile"][:1]}
# Rows with these are skipped where the extras are not installed: the others cover their pairs without them.
OF_EXTRAS = {"model=hf": "transformers", "data=hf": "datasets", "data=sft": "datasets", "adapter=lora": "peft"}
SEVERAL_RANKS = tuple(option for option in GROUPS["parallel"] if option != "parallel=single")  # ddp, fsdp, hsdp
ON_ONE_RANK = WITHOUT_COMPILER | {"parallel": ("parallel=single",)}
ON_TWO_RANKS = WITHOUT_COMPILER | {
    "parallel": SEVERAL_RANKS,
    "in_backward": SWITCHES["in_backward"][:1],
}

# Pairs that are refused: an option, another, and the start of the message.
TOKENS = ("data=hf", "data=sft", "data=synthetic_tokens", "data=text")
IMAGES = ("data=digits", "data=images", "data=synthetic_images")
CANNOT_READ = r"model=trainapp\.models\.\w+\.\w+ cannot read data=trainapp\.data\.sets\.\w+\.\w+: it needs "
ROUNDS_TO_NEAREST = tuple(o for o in GROUPS["optimizer"] if not o.startswith("optimizer=adamw_"))
REFUSED = {
    frozenset((one, other)): message
    for ones, others, message in (
        (("model=gpt",), (*IMAGES, "callbacks=confusion_matrix"), CANNOT_READ),  # which is for classes
        (("model=mlp", "model=resnet", "model=vit"), TOKENS, CANNOT_READ),
        (("callbacks=confusion_matrix",), TOKENS, r"metrics\.confusion_matrix\.num_classes: required, but not"),
        (("accumulation=fixed",), ("batch.micro_size=3",), r"accumulation\.steps=4 with batch\.micro_size=3: both"),
        (("precision=bf16_pure",), ("model=resnet",), r"precision=bf16_pure: BatchNorm needs its weights in fp32"),
        (("precision=bf16_pure",), ("train.ema=0.9",), r"precision=bf16_pure with train\.ema=0\.9: an average"),
        (("precision=bf16_pure",), ROUNDS_TO_NEAREST, r"precision=bf16_pure with [\w.]+: updates smaller than half of"),
        (
            ("precision=int8", "precision=fp8"),
            ("model=resnet",),
            r"precision=\w+: no nn\.Linear in the blocks of ResNet",
        ),
        (("adapter=lora",), ("model=resnet",), r"adapter\.targets=auto: no linear layers in the blocks of ResNet"),
        (("debug=nonfinite",), ("precision=fp16",), r"train\.detect_anomaly=true with precision=fp16 with "),
        (
            ("optimizer.in_backward=true",),
            ("train.compile=true", "train.nonfinite=skip", "precision=fp16", *SEVERAL_RANKS),
            r"optimizer\.in_backward=true with [\w.]+=\S+: each parameter is updated",
        ),
        (
            ("optimizer=adamw_8bit", "optimizer=adamw_4bit", "optimizer=adafactor"),
            SEVERAL_RANKS[1:],
            r"optimizer\.\w+=[\w.]+ with parallel=fsdp: (the|its) state",
        ),
    )
    for one in ones
    for other in others
}

# Compiling its many blocks takes minutes on two ranks, or with what is recomputed.
TOO_LONG = {
    frozenset(("model=resnet", "train.compile=true", option))
    for option in (*SEVERAL_RANKS, "activation_checkpointing=full")
}

# What keeps a run small. None of it is a default that another choice of option depends on.
SMALL = (
    "train.device=cpu",
    "train.max_steps=3",
    "train.max_epochs=null",
    "batch.global_size=16",
    "every.log=1",
    "every.eval=3",
    "every.save=3",
    "parallel.timeout=150",  # a plan before the first step is slow where the machine is
)
OF_MODEL = {
    "model=mlp": ("model.width=16",),
    "model=resnet": ("model.width=4",),
    "model=vit": ("model.depth=3", "model.width=16", "model.heads=2"),
    "model=gpt": ("model.depth=3", "model.width=16", "model.heads=2", "model.context_length=16"),
}
# As hf, of what has no tokens.
OF_VIT = (
    "model.task=image_classification",
    "model.config={model_type: vit, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, "
    "num_attention_heads: 2, patch_size: 4}",
)
OF_DATA = {
    "data=digits": (),
    "data=images": ("data.image_size=8",),
    "data=synthetic_images": ("data.size=100", "data.val_size=20", "data.image_shape=[3,8,8]"),
    "data=synthetic_tokens": ("data.size=100", "data.val_size=20", "data.vocab_size=32"),
    "data=text": ("data.files=a.txt",),
    "data=hf": ("data.vocab_size=300", "data.context_length=16"),
    "data=sft": ("data.context_length=16",),
}


def pairs_of(row):
    return {frozenset(pair) for pair in itertools.combinations(row, 2)}


def all_pairs(factors):
    """Every pair of options of two groups, without those that are refused."""
    groups = itertools.combinations(factors.values(), 2)
    return {frozenset(pair) for a, b in groups for pair in itertools.product(a, b)} - REFUSED.keys()


def is_barred(row):
    """Whether its last option cannot be had with the others."""
    *row, last = row
    barred = REFUSED.keys()
    return any(frozenset((last, other)) in barred for other in row) or any(
        frozenset((last, *pair)) in TOO_LONG for pair in itertools.combinations(row, 2)
    )


def without_extras(pairs):
    return {pair for pair in pairs if not OF_EXTRAS.keys() & pair}


def covering(factors, wanted=None):
    """Rows with one option per group that together have every wanted pair, and no pair that is refused."""
    uncovered = all_pairs(factors) if wanted is None else set(wanted)
    rows = []
    while uncovered:
        row = sorted(min(uncovered, key=sorted))  # start at a pair that is lacking, then add what covers most
        chosen = [next(name for name, options in factors.items() if option in options) for option in row]
        for name, options in factors.items():
            if name in chosen:
                continue
            allowed = [option for option in options if not is_barred((*row, option))]
            row.append(max(allowed, key=lambda o: sum(frozenset((o, other)) in uncovered for other in row)))
        rows.append(tuple(sorted(row)))
        uncovered -= pairs_of(row)
    return rows


PLAIN = {name: tuple(o for o in options if o not in OF_EXTRAS) for name, options in FACTORS.items()}


def in_two_parts(factors, wanted):
    """Rows for the pairs that need no extra, then for the others."""
    plain = {name: tuple(o for o in options if o in PLAIN[name]) for name, options in factors.items()}
    rows = covering(plain, without_extras(wanted))
    return rows + covering(factors, wanted - without_extras(wanted))


ALONE = in_two_parts(ON_ONE_RANK, all_pairs(ON_ONE_RANK))
# Two ranks take some seconds: there, every option meets every strategy; among themselves options meet on one rank.
WITH_STRATEGY = {pair for pair in all_pairs(ON_TWO_RANKS) if any(option in GROUPS["parallel"] for option in pair)}
TOGETHER = in_two_parts(ON_TWO_RANKS, WITH_STRATEGY)
# Compiling takes a minute: the pairs with it are covered by as few rows as possible.
COMPILED = in_two_parts(FACTORS, {pair for pair in all_pairs(FACTORS) if "train.compile=true" in pair})


# With each push: the first rows have most of the pairs, four of five on one rank; each later one adds few. Those with
# extras are last.
OFTEN = {
    *ALONE[:20],
    *(next(row for row in ALONE if extra in row) for extra in OF_EXTRAS),
    *TOGETHER[:5],
    *COMPILED[:2],
}


def sampled(rows):
    """All rows, most of them nightly."""
    return [row if row in OFTEN else pytest.param(row, marks=pytest.mark.nightly) for row in rows]


def test_the_rows_have_every_pair():
    for rows, wanted in (
        (ALONE, all_pairs(ON_ONE_RANK)),
        (TOGETHER, WITH_STRATEGY),
        (ALONE + TOGETHER + COMPILED, all_pairs(FACTORS)),
    ):
        covered = set().union(*map(pairs_of, rows))
        assert wanted <= covered
        assert all(len(row) == len(FACTORS) for row in rows)
        assert not REFUSED.keys() & covered
    assert not all_pairs(ON_ONE_RANK) <= set().union(*map(pairs_of, ALONE[5:]))
    often = set().union(*map(pairs_of, OFTEN)) & all_pairs(ON_ONE_RANK)
    assert len(often) > 0.8 * len(all_pairs(ON_ONE_RANK))
    assert {option for options in FACTORS.values() for option in options} == {option for row in OFTEN for option in row}
    assert len(ALONE + TOGETHER) < 120  # of 700 million; precisions times optimizers are 56


def complete(folder, row):
    """The overrides of a run of these options, small. Writes the files that it reads."""
    if {"precision=int8", "precision=fp8"} & set(row):
        pytest.importorskip("torchao", reason="needs the extra trainapp[torchao]")
    for package in {OF_EXTRAS[option] for option in OF_EXTRAS.keys() & set(row)}:
        pytest.importorskip(package, reason="needs an extra")
    (folder / "a.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 100)
    model = next((o for o in row if o.startswith("model=")), "model=mlp")
    data = next((o for o in row if o.startswith("data=")), "data=digits")
    row = [o for o in dict.fromkeys((model, data, *row)) if o[0] != "~" and not o.endswith("weights.safetensors")]
    if "optimizer.in_backward=true" in row:
        row.append("train.grad_clip=null")
    files = [o.replace("a.txt", str(folder / "a.txt")) for o in OF_DATA[data]]
    if data == "data=images":
        # 32 of each class train, so that an epoch ends with a whole step: BatchNorm refuses a single sample.
        files.append(f"data.path={image_folders.fill(folder / 'images', 35)}")
    if data == "data=hf":
        files.append(f"data.path={hf_files.texts(folder / 'texts.jsonl')}")
    if data == "data=sft":
        files.append(f"data.files={hf_files.examples(folder / 'chat.jsonl')}")
        files.append(f"data.tokenizer={hf_files.tokenizer_folder(folder / 'tokenizer')}")
    small = OF_MODEL[model] if model != "model=hf" else hf_files.CAUSAL[1:] if data in TOKENS else OF_VIT
    return [*row, *SMALL, *small, *files]


# What no initial weight depends on, and what would take long to prepare: with a limit, blocks are chosen by plans.
WITHOUT_WEIGHTS = ("parallel=", "train.compile=", "adapter=", "memory.limit=", "activation_checkpointing=", "debug=")


def save_weights(folder, overrides):
    """The model's initial weights under another seed, as a file."""
    from safetensors.torch import save_model

    of_model = [o for o in overrides if not o.startswith(WITHOUT_WEIGHTS)]
    run = runs.prepare(folder / "other", *of_model, "train.seed=1", "memory.guard=false")
    run.close()
    save_model(run.state.model, str(folder / "weights.safetensors"))
    return f"model.init_from={folder / 'weights.safetensors'}"


def train(rank: int, config: Config) -> None:
    """On a worker of the pool."""
    with worker.process_group(config) as ranks:
        runner.run(config, ranks)


def check(folder, row, pool=None):
    """Three steps of these options, on two ranks where `parallel` asks for more than one: on those of the pool if there
    is one, or through the launcher.
    """
    overrides = complete(folder, row)
    if "model.init_from=weights.safetensors" in row:
        overrides = [o for o in overrides if o != "model.init_from=null"] + [save_weights(folder, overrides)]
    run_dir = folder / "run"
    if "parallel=single" in row:
        assert runs.run(run_dir, *overrides, "memory.guard=false").steps == 3
    elif pool is not None:
        config = compose.from_command_line([*overrides, "parallel.devices=2", "memory.guard=false"], str(run_dir))
        pool.run(2, train, config, limit=180.0)  # CPUs without instructions for 16 bits are slower
    else:
        command = (*overrides, "parallel.devices=2", f"hydra.run.dir={run_dir}")
        done = run_cli(*command, cwd=folder, timeout=400)
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-3000:]}{done.stderr[-6000:]}"
    assert result(run_dir)["steps"] == 3
    lines = metrics(run_dir)
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(0 < line["loss"] < 20 for line in lines)


def named(row):
    """Without what is chosen by default."""
    plain = ("null", "=auto", "false", "=1", "standard", "=stop")
    return " ".join(re.sub(r"^\w+[.=]", "", o) for o in row if not o.endswith(plain) and o[0] != "~")


@pytest.mark.slow
@pytest.mark.parametrize("row", sampled(ALONE), ids=named)
def test_every_pair_trains_on_one_rank(tmp_path, row):
    check(tmp_path, row)


@pytest.mark.slow
@pytest.mark.parametrize("row", sampled(TOGETHER), ids=named)
def test_every_pair_trains_on_two_ranks(tmp_path, pool, row):
    check(tmp_path, row, pool)


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize("row", sampled(COMPILED), ids=named)
def test_every_pair_with_compile_trains(tmp_path, row):
    check(tmp_path, row)


@pytest.mark.parametrize("options", list(REFUSED), ids=lambda options: " ".join(sorted(options)))
def test_what_is_refused_is_one_message(tmp_path, options):
    with pytest.raises(UserError, match=REFUSED[options]) as refused:
        runs.run(tmp_path / "run", *complete(tmp_path, sorted(options)))
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "run").exists()
