"""The configuration: every setting with its type and its rule. Imports no torch.

`compose` turns what Hydra composed into these plain dataclasses. Everything
downstream, workers included, sees only these.
"""

import dataclasses
from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from trainapp.config.inference_settings import Generate, Predict
from trainapp.config.lr_settings import LrFind
from trainapp.config.parallel_settings import STRICT, Parallel
from trainapp.config.rules import (
    Auto,
    ByteCount,
    Duration,
    EvalName,
    Goal,
    MemorySize,
    MicroSchedule,
    ParameterGroups,
    Seed,
    UpdateName,
)
from trainapp.config.validation import Bool, Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Str


@dataclass(config=STRICT)
class Train:
    max_steps: PositiveInt | None = None
    max_epochs: PositiveInt | None = None
    seed: Seed = 0
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    compile: Bool = False
    deterministic: Bool = False
    grad_clip: PositiveFloat | None = 1.0
    nonfinite: Literal["stop", "skip"] = "stop"
    detect_anomaly: Bool = False
    check_loss: Bool = True
    check_exactness: Bool = False
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    peak_flops: PositiveFloat | None = None


@dataclass(config=STRICT)
class Batch:
    global_size: PositiveInt = 64
    micro_size: Literal["auto", "plan"] | PositiveInt = "auto"
    eval_micro_size: Auto | PositiveInt = "auto"
    micro_schedule: MicroSchedule | None = None


@dataclass(config=STRICT)
class Every:
    log: Duration | None = 10
    eval: Duration | None = "1 epochs"
    save: Duration | None = "1 epochs"


@dataclass(config=STRICT)
class Sampling:
    weights: Str | None = None


@dataclass(config=STRICT)
class Loader:
    num_workers: Auto | NonNegativeInt = "auto"
    drop_last: Bool = False
    on_change: Literal["refuse", "next_epoch"] = "refuse"
    sampling: Sampling = field(default_factory=Sampling)


@dataclass(config=STRICT)
class Precision:
    mode: Literal["fp32", "tf32", "bf16", "bf16_pure", "fp16", "int8", "fp8"] = "fp32"
    initial_scale: PositiveFloat = 65536.0
    growth_interval: PositiveInt = 2000


@dataclass(config=STRICT)
class Schedule:
    """A shape, or what `target` names with these `arguments`; then only `warmup` of the others counts."""

    shape: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    warmup: Duration = 0
    decay: Duration = "20 percent"
    final: Annotated[float, Field(ge=0, le=1)] = 0.0
    target: Str | None = None
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(config=STRICT)
class Optimizer:
    """The settings that the application reads; `arguments` go to the optimizer class unchanged."""

    target: Str
    lr: PositiveFloat | None = None  # the class's own
    weight_decay: NonNegativeFloat = 0.0
    fused: Auto | Bool = "auto"
    in_backward: Bool = False
    offload: Bool = False
    groups: ParameterGroups = field(default_factory=list)
    layer_decay: Annotated[float, Field(gt=0, le=1, strict=True)] | None = None
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(config=STRICT)
class Update:
    """One of several updates of a step: a loss, the parameters that it trains, their optimizer."""

    name: UpdateName
    task: Str
    parameters: Annotated[list[Str], Field(min_length=1)]
    optimizer: Optimizer
    every: PositiveInt = 1  # steps, the first of which has every update
    task_arguments: dict[str, Any] = field(default_factory=dict)  # from a task that is written as a mapping


@dataclass(config=STRICT)
class Accumulation:
    steps: Auto | PositiveInt = "auto"


@dataclass(config=STRICT)
class ActivationCheckpointing:
    mode: Literal["none", "full", "selective", "budget"] = "none"
    every: PositiveInt = 1
    bytes: Auto | ByteCount = "auto"


@dataclass(config=STRICT)
class Memory:
    limit: MemorySize | None = None
    loss_chunk: Auto | PositiveInt | None = None
    offload_activations: Literal["none", "all", "inputs"] = "none"
    expandable_segments: Bool = True
    timeline: Bool = False
    guard: Bool = True
    guard_reserve: MemorySize = 0.05


@dataclass(config=STRICT)
class Plan:
    device: Str | None = None
    world: PositiveInt | None = None
    levers: Bool = True


@dataclass(config=STRICT)
class Oom:
    enabled: Bool = True
    keep_global_batch: Bool = True
    clean_steps: PositiveInt = 3
    grow: Bool = True


@dataclass(config=STRICT)
class Checkpointing:
    resume: Str = "auto"
    load: Literal["all", "weights"] = "all"
    save: Bool = True
    keep_last: PositiveInt = 2
    asynchronous: Bool = False


@dataclass(config=STRICT)
class Stopping:
    patience: PositiveInt | None = None
    min_delta: NonNegativeFloat = 0.0
    metric: Goal = "auto"


@dataclass(config=STRICT)
class Export:
    folder: Str | None = None
    file_size: MemorySize = "5GB"
    merge: Bool = False
    merge_dtype: Literal["fp32", "bf16"] = "fp32"


@dataclass(config=STRICT)
class Adapter:
    kind: Literal["none", "lora"] = "none"
    rank: PositiveInt = 8
    alpha: PositiveFloat = 16.0
    dropout: Fraction = 0.0
    targets: Auto | list[Str] = "auto"
    train: Auto | list[Str] = "auto"
    base_dtype: Literal["fp32", "bf16"] = "fp32"


@dataclass(config=STRICT)
class Target:
    """An object to build: a dotted name and the keyword arguments of its constructor."""

    target: Str
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(config=STRICT)
class Model(Target):
    init_from: Str | None = None
    init_strict: Bool = True
    freeze: list[Str] = field(default_factory=list)


@dataclass(config=STRICT)
class Config:
    """One run. `run_dir` is where the run writes its files; `command` is the shell command that resumes it; `given` are
    the settings that the command line names.
    """

    data: Target
    loader: Loader
    model: Model
    optimizer: Optimizer
    updates: list[Update] = field(default_factory=list)
    eval: dict[EvalName, Target] = field(default_factory=dict)
    mode: Literal["train", "eval", "predict", "generate", "export", "plan", "lr_find"] = "train"
    task: Str = "auto"
    task_arguments: dict[str, Any] = field(default_factory=dict)  # from a task that is written as a mapping
    objective: Goal = "auto"
    user_packages: list[Str] = field(default_factory=list)
    train: Train = field(default_factory=Train)
    batch: Batch = field(default_factory=Batch)
    every: Every = field(default_factory=Every)
    precision: Precision = field(default_factory=Precision)
    schedule: Schedule = field(default_factory=Schedule)
    accumulation: Accumulation = field(default_factory=Accumulation)
    parallel: Parallel = field(default_factory=Parallel)
    activation_checkpointing: ActivationCheckpointing = field(default_factory=ActivationCheckpointing)
    memory: Memory = field(default_factory=Memory)
    oom: Oom = field(default_factory=Oom)
    plan: Plan = field(default_factory=Plan)
    checkpointing: Checkpointing = field(default_factory=Checkpointing)
    stopping: Stopping = field(default_factory=Stopping)
    metrics: dict[str, Target] = field(default_factory=dict)
    callbacks: dict[str, Target] = field(default_factory=dict)
    tracker: dict[str, Target] = field(default_factory=dict)
    export: Export = field(default_factory=Export)
    lr_find: LrFind = field(default_factory=LrFind)
    predict: Predict = field(default_factory=Predict)
    generate: Generate = field(default_factory=Generate)
    adapter: Adapter = field(default_factory=Adapter)
    run_dir: str = ""
    command: str = ""
    given: list[str] = field(default_factory=list, compare=False)

    @property
    def optimizers(self) -> dict[str, Optimizer]:
        """By the setting that they come from: of each update, or the only one."""
        if not self.updates:
            return {"optimizer": self.optimizer}
        return {f"updates.{number}.optimizer": update.optimizer for number, update in enumerate(self.updates)}

    def chooses(self, name: str) -> bool:
        """Whether the command line names this section or setting, or one within it."""
        return any(f"{given}.".startswith(f"{name}.") for given in self.given)

    def to_dict(self) -> dict[str, Any]:
        """Plain containers, as written to checkpoints and TensorBoard."""
        return dataclasses.asdict(self)
