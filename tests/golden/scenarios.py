"""The runs whose results must stay: tiny models on built-in data, by the command line, each in a folder of its own."""

from dataclasses import dataclass

from faults import Fault
from runs import MODELS, TINY


@dataclass(frozen=True)
class Command:
    """One command of `python -m trainapp`, given as on a command line, in the scenario's folder.

    faults: what fails in it; the run must use a part of `parts.py`. touches: empty files that are made before it.
    is_unordered: whether the lines of several processes come in any order.
    """

    arguments: str
    faults: tuple[Fault, ...] = ()
    touches: tuple[str, ...] = ()
    is_unordered: bool = False


@dataclass(frozen=True)
class Scenario:
    """Commands that follow each other in one folder.

    needs: packages without which it is skipped. is_continued: whether the folder begins as a copy of `before`.
    varying: keys of values that differ between two runs of this scenario, and varying_text: a pattern of such texts.
    unsteady: pattern of lines and of names of files that are there or not, depending on which process is first.
    has_settings: whether its record holds all settings as checkpoints' manifests have them.
    """

    name: str
    commands: tuple[Command, ...]
    needs: tuple[str, ...] = ()
    is_continued: bool = False
    varying: tuple[str, ...] = ()
    varying_text: str = "(?!)"
    unsteady: str = "(?!)"
    has_settings: bool = False


# Every run has a limit: otherwise that of the machine is in its results.
PLAIN = " ".join((*TINY, "memory.limit=64MiB", "tracker=[]"))
MLP, GPT, RESNET = (f"{PLAIN} {' '.join(MODELS[name])}" for name in ("mlp", "gpt", "resnet"))
PARTS = "user_packages=[parts,own_models,zoo]"
NORMS = f"{PARTS} '+callbacks.norms={{_target_: parts.Norms}}'"
RUN = "hydra.run.dir=run"
GAN_UPDATES = (
    "'updates=[{name: discriminator, task: zoo.gans.discriminate, parameters: [discriminator], optimizer: {lr: 0.02}}, "
    "{name: generator, every: 2, task: zoo.gans.generate, parameters: [generator], "
    "optimizer: {_target_: torch.optim.SGD, lr: 0.05, momentum: 0.9}}]'"
)
GAN = (
    f"{PLAIN} {GAN_UPDATES} model._target_=zoo.gans.GAN data._target_=zoo.data.Vectors "
    "task=zoo.gans.distance schedule=constant"
)
LLAMA = (
    "model=hf model.task=causal_lm 'model.config={model_type: llama, hidden_size: 16, intermediate_size: 24, "
    "num_hidden_layers: 1, num_attention_heads: 2}' data=synthetic_tokens data.vocab_size=32 data.context_length=16 "
    "data.size=64 data.val_size=16"
)
SEARCH = "data.min_length=12 train.max_steps=12 oom.clean_steps=1 every.eval=4"
REPLAY = "\"batch.micro_schedule='<micro_schedule of run>'\""
SWEEP = f"-m {MLP} hydra.sweep.dir=sweep every.eval=2"
STOPS = "'+callbacks.stops={_target_: parts.Stops, step: 3, run: run}'"
STOPS_SWEEP = "'+callbacks.stops={_target_: parts.Stops, step: 1, run: \"1\", is_for_sweep: true}'"
HALVING = "train.max_steps=4 sweep.pruner=halving sweep.eta=2 sweep.rungs=1 optimizer.lr=0.02,1e-9"
TWO_RANKS = "parallel.devices=2 parallel.timeout=30 data.min_length=12 batch.global_size=32 batch.micro_size=16"
# SGD: the first steps of AdamW turn differences of rounding into others.
NORMED = f"{PLAIN} data=digits model._target_=own_models.Normed optimizer=sgd optimizer.lr=0.01"
QUADS = f"{PLAIN} data=digits model._target_=own_models.Quads"
POINT = f"{PLAIN} data=digits model._target_=own_models.NormedPoint"
QUIET = "train.device=cpu memory.guard=false memory.limit=64MiB 'tracker=[]'"
# Of several ranks: when a tensor is freed that was exchanged depends on the other ranks.
MEMORY_OF_RANKS = tuple(
    f"memory/{name}{which}"
    for name in ("allocated", "reserved", "peak", "peak_reserved")
    for which in ("", "_min", "_max", "_min_rank", "_max_rank")
)
OF_RANKS = {
    "varying": (
        *(*MEMORY_OF_RANKS, "memory/percent_of_limit", "peak_memory_bytes", "peak_reserved_bytes"),
        *("used", "activations"),
    ),
    "varying_text": r"(memory +|, )[\d.]+ [KM]iB(?= (/|of) )",
}
MISTAKES = (
    "batch.micro_sze=3",
    "precision=bf17",
    "optimizer.lr=-1 train.ema=2",
    "optimizer.in_backward=true",
    "model.depth=0",
    "objective='max f1' every.eval=2",
    "checkpointing.resume=nowhere",
    "parallel=ddp",
    "memory.limit=much",
    "model._target_=torch.nn.Linear",
    "'model.freeze=[nothing]'",
    "'every.save=2 weeks'",
)


# The folder `before`, as commands and what stops them: a run that ends halfway, and a sweep, in its second job.
TINIEST = f"{PLAIN} data=digits model=mlp model.width=2 model.depth=1 optimizer=sgd every.eval=2"
BEFORE = (
    (f"{TINIEST} {RUN} {NORMS} train.max_steps=6", STOPS),
    (f"-m {TINIEST} hydra.sweep.dir=sweep {PARTS} optimizer.lr=0.05,0.1 checkpointing.keep_last=1", STOPS_SWEEP),
)


def scenario(name: str, *commands: Command | str, **more: object) -> Scenario:
    """Return a scenario of commands, those without faults as texts."""
    return Scenario(name, tuple(Command(own) if isinstance(own, str) else own for own in commands), **more)


SCENARIOS = (
    scenario(
        "one_process",
        f"{MLP} {RUN} train.ema=0.9 train.max_steps=5 every.eval=2 every.save=2 checkpointing.keep_last=9 "
        "'tracker=[tensorboard,csv]' 'callbacks=[predictions]' 'optimizer.groups=[{match: head, lr: 1e-2}]' "
        "'+eval.hard={_target_: trainapp.data.sets.digits.Digits}' memory.timeline=true",
        "continue run train.max_steps=6",
        "report run",
        has_settings=True,
    ),
    # Memory runs out in training and in evaluation; the size grows again; the schedule replays it.
    scenario(
        "search",
        f"{GPT} {SEARCH} {RUN} memory.limit=250KiB",
        f"{GPT} {SEARCH} hydra.run.dir=replay {REPLAY} every.eval=null",
        "diff run replay",
    ),
    # An error in each phase that a step can be in, with BatchNorm's buffers and a weight average.
    scenario(
        "phases",
        Command(
            f"{NORMED} {RUN} {NORMS} train.ema=0.9 train.max_steps=13 batch.global_size=32 oom.clean_steps=1 "
            "every.eval=5 every.save=4",
            faults=(
                Fault("data", 2),
                Fault("forward", 3, 6),
                Fault("loss", 4),
                Fault("backward", 5, 6),
                Fault("evaluate", 5, 24),
                Fault("metric", 6),
                Fault("clip", 7),
                Fault("after the commit", 8),
                Fault("weight average", 9),
                Fault("commit", 11, 1),
                Fault("start", 12),
            ),
        ),
        Command(
            f"{NORMED} {RUN} {NORMS} batch.global_size=32 train.ema=0.9 train.max_steps=14",
            faults=(Fault("save", 14, 1),),
        ),
    ),
    scenario(
        "fp16",
        Command(
            f"{GPT} {RUN} {NORMS} precision=fp16 precision.initial_scale=256 train.max_steps=4 train.nonfinite=skip",
            faults=(Fault("unscale", 2), Fault("loss", 3, kind="nan")),
        ),
    ),
    scenario(
        "in_backward",
        Command(
            f"{GPT} {RUN} {NORMS} optimizer.in_backward=true train.grad_clip=null every.save=2 schedule=constant",
            faults=(Fault("update in backward", 3, 2), Fault("backward after updates", 4, 4)),
        ),
    ),
    # A signal in step 3, a checkpoint, the same command.
    scenario(
        "stopped_by_a_signal",
        f"{GPT} {RUN} {NORMS} {STOPS} train.max_steps=5 every.eval=2",
        f"{GPT} {RUN} {NORMS} {STOPS} train.max_steps=5 every.eval=2",
        f"{GPT} hydra.run.dir=undisturbed {NORMS} {STOPS} train.max_steps=5 every.eval=2",
        "diff run undisturbed",
        "leaderboard .",
    ),
    scenario(
        "stream",
        Command(
            f"{MLP} {RUN} {NORMS} {STOPS} data._target_=parts.Numbered ~data.augment data.num_workers=0 "
            "train.max_steps=6 every.eval=2 every.save=2",
            faults=(Fault("read", 2), Fault("backward", 3, 2), Fault("evaluate", 2, 2)),
        ),
        "continue run",
    ),
    # Two updates in turn, one of them rarely; each has its own sizes.
    scenario(
        "gan",
        Command(
            f"{GAN} {RUN} {NORMS} train.max_steps=5 oom.clean_steps=1 every.eval=2 every.save=2",
            faults=(
                Fault("backward", 2, 2, update="generator"),
                Fault("forward", 3, 6, update="discriminator"),
                Fault("commit", 4, 1, update="generator"),
            ),
        ),
        f"{GAN} hydra.run.dir=replay {NORMS} train.max_steps=5 {REPLAY}",
        "diff run replay",
        has_settings=True,
    ),
    scenario(
        "own_parts",
        f"{MLP} {RUN} {NORMS} task=parts.smoothed '+metrics.recall={{_target_: parts.Recall}}' "
        "'objective=max recall/1' every.eval=2 stopping.patience=1 train.max_steps=9",
        Command(f"{MLP} hydra.run.dir=not_a_number {NORMS}", faults=(Fault("loss", 3, kind="nan"),)),
        f"{MLP} hydra.run.dir=broken {PARTS} model._target_=parts.Fragile model.width=5",
        f"{MLP} hydra.run.dir=no_sum {PARTS} task=parts.mean",
    ),
    # Models that cannot run so few samples, of which the first recovers; and what does not fit at all.
    scenario(
        "limits",
        Command(f"{QUADS} {RUN} {NORMS} batch.micro_size=8 oom.grow=false", faults=(Fault("forward", 1, times=2),)),
        f"{POINT} hydra.run.dir=one_sample {PARTS} batch.micro_size=1",
        f"{GPT} hydra.run.dir=hopeless memory.limit=70KiB",
        f"{GPT} hydra.run.dir=before_any_sample memory.limit=30KiB",
    ),
    scenario(
        "bf16",
        f"{GPT} {RUN} precision=bf16 activation_checkpointing=full memory.loss_chunk=8 optimizer=adamw_8bit "
        "model.width=64 data.vocab_size=128",
        f"{GPT} hydra.run.dir=pure precision=bf16_pure optimizer=adamw_bf16 activation_checkpointing=selective",
        f"{RESNET} hydra.run.dir=resnet train.max_steps=3 'model.freeze=[conv1]' optimizer=muon schedule=wsd",
        varying=("accuracy",),  # the largest of logits in 16 bits
    ),
    scenario(
        "lora",
        f"{PLAIN} {LLAMA} {RUN} adapter=lora",
        f"mode=export {QUIET} checkpointing.resume=run hydra.run.dir=adapters",
        f"mode=export {QUIET} checkpointing.resume=run hydra.run.dir=merged export.merge=true",
        needs=("transformers", "peft"),
    ),
    # What a trained run is used for.
    scenario(
        "inference",
        f"{GPT} {RUN} every.eval=2 model.dropout=0",
        f"mode=eval {QUIET} checkpointing.resume=run hydra.run.dir=eval",
        f"mode=predict {QUIET} checkpointing.resume=run/checkpoints/best hydra.run.dir=predict data.val_size=3",
        f"mode=generate {QUIET} checkpointing.resume=run hydra.run.dir=generate 'generate.prompts=[[1,2],[3]]' "
        "generate.max_new_tokens=3 generate.temperature=0",
        f"mode=export {QUIET} checkpointing.resume=run hydra.run.dir=export",
        f"{GPT} model.dropout=0 hydra.run.dir=warm model.init_from=run train.max_steps=1",
    ),
    scenario(
        "lr_find", f"mode=lr_find {MLP} {RUN} batch.global_size=64 lr_find.steps=16 lr_find.min=1e-3 lr_find.max=3"
    ),
    scenario(
        "plan",
        f"mode=plan {MLP} {RUN} batch.global_size=256 memory.limit=100KiB",
        f"mode=plan {GPT} hydra.run.dir=ranks parallel=fsdp plan.world=2 plan.techniques=false",
        # In the backward two neighbours are entered at once; which of them is named depends on the seed of hashes.
        varying=("module",),
        varying_text=r"\(layers\.1\.[12]\)",
    ),
    # Each of these is one message.
    scenario("mistakes", *(f"{MLP} hydra.run.dir={n} {wrong}" for n, wrong in enumerate(MISTAKES))),
    # A grid with a job that fails, and one more time when it was mended.
    scenario(
        "sweep",
        f"{SWEEP} {PARTS} model._target_=parts.Fragile model.width=4,5",
        Command("continue sweep sweep.retry_failed=true", touches=("mended",)),
        "leaderboard sweep",
        "diff sweep/0 sweep/1",
        "rerun sweep/0 hydra.run.dir=rerun train.max_steps=1",
    ),
    # Jobs are paused at a rung, the better one resumes; a signal stops the sweep in its second job, which is continued.
    scenario(
        "halving",
        Command(f"{SWEEP} {HALVING} {PARTS} {STOPS_SWEEP}", is_unordered=True),
        "continue sweep",
        "leaderboard sweep",
    ),
    # A checkpoint and a sweep of the version before are continued.
    scenario("continued", "continue run", "continue sweep", is_continued=True),
    scenario(
        "ddp",
        Command(
            f"{GPT} {RUN} {NORMS} {TWO_RANKS} parallel=ddp train.max_steps=6 every.eval=3 every.save=2",
            faults=(
                Fault("backward", 2, 20, rank=1),
                Fault("forward", 3, 20),
                Fault("evaluate", 3, 4, rank=1),
                Fault("gradients", 4, rank=1),
                Fault("commit", 5, 2, rank=1),
            ),
            is_unordered=True,
        ),
        **OF_RANKS,
        unsteady=r"SIGTERM: |\.png$",  # after the commit the launcher ends the other rank, unless that ends by itself
    ),
    scenario(
        "fsdp",
        Command(
            f"{GPT} {RUN} {NORMS} {TWO_RANKS} parallel=fsdp train.max_steps=5 every.eval=3 every.save=2",
            faults=(
                Fault("forward", 2, 60, rank=1),
                Fault("clip", 3, 1),
                Fault("evaluate", 3, 4, rank=1),
                Fault("backward", 4, 20, rank=1, kind="term"),
            ),
            is_unordered=True,
        ),
        f"{GPT} {RUN} {NORMS} data.min_length=12 batch.global_size=32 train.max_steps=5 every.eval=3 parallel=single",
        **OF_RANKS,
    ),
)
