"""The configuration: every setting with its type and its rule. Imports no torch.

`compose` turns Hydra's configuration into these plain dataclasses; everything downstream, workers included, sees only
these. `excludes` lists settings that exclude each other.
"""

import dataclasses
import json
import re
import time
from collections.abc import Callable
from dataclasses import field
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    WrapValidator,
    field_validator,
    model_validator,
)
from pydantic.dataclasses import dataclass
from typing_extensions import NotRequired, Self, TypedDict

from trainapp.config.modes import ACTIVITIES, Activity, Mode
from trainapp.units import parse_duration, parse_memory_size, parse_time
from trainapp.validation import Bool, Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Str

STRICT = ConfigDict(extra="forbid")
OTHER_METRICS = ("train", "batch", "memory", "lr", "micro")  # prefixes of other metrics and files


def _readable_by(parse: Callable[[Any], Any]) -> AfterValidator:
    """Return a check that `parse` can read a value, which stays as it is."""

    def check(value: Any) -> Any:
        parse(value)
        return value

    return AfterValidator(check)


def _check_time(value: Any) -> Any:
    if value != "auto" and parse_time(value) is None:
        raise ValueError("must be a time such as 11h50m or '90 minutes', or auto: the end of the Slurm job")
    return value


def _check_objective(value: str) -> str:
    if value != "auto" and not re.fullmatch(r"(min|max) \S+", value):
        raise ValueError("must be auto, or like 'max accuracy' or 'min loss'")
    return value


def _check_eval_name(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_-]+", value) or value in ("val", "train"):
        raise ValueError("must consist of letters, digits, _ and -, as part of metric names, and not be val or train")
    return value


def _check_update_name(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z]\w*", value) or value.startswith("eval") or value in OTHER_METRICS:
        raise ValueError(
            f"must be one word, the prefix of its metrics, and none of eval..., {', '.join(OTHER_METRICS)}"
        )
    return value


def _check_micro_schedule(value: Any, checked: Callable[[Any], Any]) -> Any:
    """Check sizes, also in the text of a JSON object, such as the one in result.json."""
    try:
        sizes = json.loads(value) if isinstance(value, str) else value
        return checked(sizes)
    except ValueError:
        raise ValueError(
            "must give sizes by the step from which they apply, such as {1: 64, 30: 32}, or by step and elements per "
            "sample, such as {1: {128: 64, 256: 32}}; with updates, one of these by the name of each; null for none"
        ) from None


def _separate_arguments(node: Any, names: set[str]) -> Any:
    """Return a node `{_target_: CLASS, KEY: VALUE}` with the arguments of the class apart from the settings.

    Args:
        node: from the YAML files. Returned as it is if it names no class.
        names: of the settings; all other keys are arguments of the class.
    """
    if not isinstance(node, dict) or "_target_" not in node:
        return node
    settings = {}
    arguments = {}
    for key, value in node.items():
        if key in names:
            settings[key] = value
        elif key != "_target_":
            arguments[key] = value
    return settings | {"target": node["_target_"], "arguments": arguments}


def _time_or_duration(value: int | str) -> Any:
    return parse_time(value) or parse_duration(value)


def _memory_size(value: int | float | str) -> int:
    return parse_memory_size(value, total=1)


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Auto = Literal["auto"]
Duration = Annotated[int | str, _readable_by(parse_duration)]
DurationOrTime = Annotated[int | str, _readable_by(_time_or_duration)]
Time = Annotated[str, BeforeValidator(_check_time)]
MemorySize = Annotated[int | float | str, _readable_by(_memory_size)]
UpdateName = Annotated[str, AfterValidator(_check_update_name)]
Count = Annotated[int, Field(gt=0)]  # not strict: in JSON, keys are strings
NotEmpty = Field(min_length=1)
SizesByStep = Annotated[dict[Count, PositiveInt | Annotated[dict[Count, PositiveInt], NotEmpty]], NotEmpty]
SizesByUpdate = Annotated[dict[UpdateName, SizesByStep], NotEmpty]
MicroSchedule = Annotated[SizesByStep | SizesByUpdate, WrapValidator(_check_micro_schedule)]
EvalName = Annotated[Str, AfterValidator(_check_eval_name)]
HookName = Annotated[Str, Field(pattern=r"^\w[\w.-]*$")]
Goal = Annotated[str, AfterValidator(_check_objective)]
Seed = Annotated[int, Field(ge=0, lt=2**63, strict=True)]  # data sets may add to it, below 2**64


class _Group(TypedDict):
    """Options of the parameters that patterns match; the optimizer's class may have others."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]

    match: Annotated[list[Str], NotEmpty, BeforeValidator(_as_list)]
    lr: NotRequired[PositiveFloat]
    weight_decay: NotRequired[NonNegativeFloat]


if TYPE_CHECKING:
    ParameterGroup = dict[str, Any]
else:
    ParameterGroup = _Group


@dataclass(config=STRICT)
class Target:
    """An object to build: a dotted name and the keyword arguments of its constructor."""

    target: Str
    arguments: dict[str, Any] = field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _from_yaml(cls, node: Any) -> Any:
        if isinstance(node, dict) and not {"_target_", "target"} & node.keys():
            raise ValueError("must have a `_target_`, the class to build")
        return _separate_arguments(node, setting_names(cls))

    @model_validator(mode="wrap")
    @classmethod
    def _leave_to_users_class(cls, node: Any, validate: Callable[[Any], Self]) -> Self:
        """Take for an argument what cannot be a setting, if the class may have a parameter of this name. Whether it has
        one is known once the class is imported: see `claimed_settings`.
        """
        try:
            return validate(node)
        except ValidationError as error:
            # Only if every mistake is the value of a setting: any other mistake is one for every class.
            wrong_names = {details["loc"][0] for details in error.errors() if details["loc"]}
            is_of_user = isinstance(node, dict) and is_users_class(node.get("_target_"))
            if not is_of_user or not wrong_names <= setting_names(cls):
                raise

            valid_settings = {key: value for key, value in node.items() if key not in wrong_names}
            section = validate(valid_settings)
            for name in wrong_names:
                section.arguments[str(name)] = node[name]
            return section


def is_users_class(target: Any) -> bool:
    """Return whether a `_target_` names a class that is neither trainapp's nor that of torch or Transformers."""
    return isinstance(target, str) and "." in target and not target.startswith(("trainapp.", "torch.", "transformers."))


def setting_names(section: type[Target]) -> set[str]:
    """Return the names of the settings in a section that are no arguments of its class."""
    return {field.name for field in dataclasses.fields(section)} - {"target", "arguments"}


@dataclass(config=STRICT)
class Train:
    max_steps: PositiveInt | None = None
    max_epochs: PositiveInt | None = None
    max_time: Time | None = None
    seed: Seed = 0
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    compile: Bool = False
    deterministic: Bool = False
    grad_clip: PositiveFloat | None = 1.0
    nonfinite: Literal["stop", "skip"] = "stop"
    detect_anomaly: Bool = False
    draws: Literal["per_sample", "device"] = "per_sample"
    check_loss: Bool = True
    check_exactness: Bool = False
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    peak_flops: PositiveFloat | None = None


@dataclass(config=STRICT)
class Batch:
    global_size: PositiveInt = 64
    micro_size: Auto | PositiveInt = "auto"
    eval_micro_size: Auto | PositiveInt = "auto"
    micro_schedule: MicroSchedule | None = None

    @property
    def schedules(self) -> dict[str, dict[int, Any]]:
        """`micro_schedule` by the name of the update; "" stands for the only one."""
        schedule: Any = self.micro_schedule or {}
        is_by_update = any(isinstance(key, str) for key in schedule)
        return schedule if is_by_update else {"": schedule}


@dataclass(config=STRICT)
class Every:
    log: Duration | None = 10
    eval: Duration | None = "1 epochs"
    save: DurationOrTime | None = "1 epochs"


@dataclass(config=STRICT)
class Sampling:
    weights: Str | None = None


@dataclass(config=STRICT)
class Data(Target):
    """How samples are loaded; `arguments` are passed to the data set unchanged."""

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
    """A shape with its settings, or `target` with `arguments`: all other keys of its node.

    `warmup` of a target is among its arguments, until the signature shows whose it is: see `schedules.for_optimizer`.
    """

    shape: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    warmup: Duration = 0
    decay: Duration = "20 percent"
    final: Annotated[float, Field(ge=0, le=1)] = 0.0
    target: Str | None = None
    arguments: dict[str, Any] = field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _from_yaml(cls, node: Any) -> Any:
        return _separate_arguments(node, set())


@dataclass(config=STRICT)
class Optimizer(Target):
    """The settings that the application reads; `arguments` are passed to the optimizer class unchanged."""

    lr: PositiveFloat | None = None  # None: the class's default
    weight_decay: NonNegativeFloat | None = None  # None: the class's default
    decay: Literal["weights", "all"] = "weights"  # what it applies to
    fused: Auto | Bool = "auto"
    in_backward: Bool = False
    offload: Bool = False
    groups: list[ParameterGroup] = field(default_factory=list)
    layer_decay: Annotated[float, Field(gt=0, le=1, strict=True)] | None = None


@dataclass(config=STRICT)
class UpdateSettings:
    """One of several updates of a step: a loss, the parameters it trains, and their optimizer."""

    name: UpdateName
    task: Str
    parameters: Annotated[list[Str], Field(min_length=1)]
    optimizer: Optimizer
    every: PositiveInt = 1  # in steps; the first step has every update without an offset
    offset: NonNegativeInt | None = None  # step % every == offset % every; the first step is then like any other
    task_arguments: dict[str, Any] = field(default_factory=dict)  # from a task that is written as a mapping

    @field_validator("offset")
    @classmethod
    def _within_the_interval(cls, offset: int | None, info: ValidationInfo) -> int | None:
        every = info.data.get("every")
        if offset is not None and every is not None and offset > every:
            raise ValueError(f"must be at most `every`, {every}: it shifts the steps, and delays none; lower it")
        return offset


@dataclass(config=STRICT)
class Accumulation:
    steps: Auto | PositiveInt = "auto"


@dataclass(config=STRICT)
class Ddp:
    bucket_mb: PositiveFloat = 25.0
    static_graph: Bool = False
    find_unused_parameters: Bool = False


@dataclass(config=STRICT)
class Fsdp:
    reshard_after_forward: Bool = True
    cpu_offload: Bool = False
    prefetch: PositiveInt = 1
    replicas: PositiveInt = 1
    sync_every_micro_batch: Bool = True
    meta_init: Bool = False


@dataclass(config=STRICT)
class Parallel:
    strategy: Literal["single", "ddp", "fsdp"] = "single"
    devices: Auto | PositiveInt = "auto"
    max_restarts: NonNegativeInt = 3
    timeout: PositiveFloat = 600.0
    vote_on_oom: Literal["unvalidated", "always", "never"] = "unvalidated"
    ddp: Ddp = field(default_factory=Ddp)
    fsdp: Fsdp = field(default_factory=Fsdp)


@dataclass(config=STRICT)
class ActivationCheckpointing:
    mode: Literal["none", "selective", "full", "auto"] = "none"
    every: PositiveInt = 1
    modes: list[Literal["none", "selective", "full"]] | None = None
    compiled_budget: Fraction | None = None


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
class PlanSettings:
    device: Str | None = None
    world: PositiveInt | None = None
    techniques: Bool = True
    measure: Bool = False


@dataclass(config=STRICT)
class Oom:
    enabled: Bool = True
    clean_steps: PositiveInt = 3
    grow: Bool = True
    techniques: Literal["same", "none"] = "same"


@dataclass(config=STRICT)
class Checkpointing:
    resume: Str = "auto"
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
    merge: Bool = False
    merge_dtype: Literal["fp32", "bf16"] = "fp32"


@dataclass(config=STRICT)
class LrFind:
    min: PositiveFloat = 1e-7
    max: PositiveFloat = 10.0
    steps: Annotated[int, Field(ge=10, strict=True)] = 100
    diverges: Annotated[float, Field(gt=1, allow_inf_nan=False)] = 4.0


@dataclass(config=STRICT)
class Predict:
    output: Str | None = None
    split: Str = "val"
    batch_size: PositiveInt = 64


@dataclass(config=STRICT)
class Generate:
    prompts: list[Str | list[NonNegativeInt]] = field(default_factory=list)
    output: Str | None = None
    max_new_tokens: PositiveInt = 64
    temperature: NonNegativeFloat = 1.0
    top_k: PositiveInt | None = None
    top_p: Annotated[float, Field(gt=0, le=1, strict=True)] = 1.0
    seed: Seed = 0
    end_of_text: Auto | NonNegativeInt | None = "auto"
    batch_size: PositiveInt = 16


@dataclass(config=STRICT)
class Sweep:
    """Settings of a multirun; its jobs do not read them."""

    sampler: Literal["grid", "random", "tpe"] | Target = "grid"  # a name, or a class of Optuna with its arguments
    trials: PositiveInt | None = None
    parallel: Auto | PositiveInt = "auto"
    pack: Bool = False
    seed: Seed = 0
    pruner: Literal["none", "halving", "hyperband", "median"] = "none"
    eta: Annotated[int, Field(ge=2, strict=True)] = 3
    rungs: PositiveInt = 3
    max_time: Time | None = None
    max_failures: PositiveInt | None = None
    retry_failed: Bool = False
    storage: Str | None = None


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
class Model(Target):
    init_from: Str | None = None
    init_strict: Bool = True
    init_prefix: Str | None = None
    freeze: list[Str] = field(default_factory=list)
    freeze_mode: Literal["eval"] | None = None


@dataclass(config=STRICT)
class Config:
    """The configuration of one run. The last fields are not settings: the program fills them in."""

    data: Data
    model: Model
    optimizer: Optimizer
    updates: list[UpdateSettings] = field(default_factory=list)
    eval: dict[EvalName, Target] = field(default_factory=dict)
    mode: Mode = "train"
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
    plan: PlanSettings = field(default_factory=PlanSettings)
    checkpointing: Checkpointing = field(default_factory=Checkpointing)
    stopping: Stopping = field(default_factory=Stopping)
    metrics: dict[HookName, Target] = field(default_factory=dict)
    callbacks: dict[HookName, Target] = field(default_factory=dict)
    tracker: dict[HookName, Target] = field(default_factory=dict)
    export: Export = field(default_factory=Export)
    lr_find: LrFind = field(default_factory=LrFind)
    predict: Predict = field(default_factory=Predict)
    generate: Generate = field(default_factory=Generate)
    sweep: Sweep = field(default_factory=Sweep)
    adapter: Adapter = field(default_factory=Adapter)
    run_dir: str = ""  # where the run writes its files
    command: str = ""  # the shell command that resumes it
    given: list[str] = field(default_factory=list, compare=False)  # the settings that the command line names
    started: float = field(default_factory=time.time, compare=False)  # Unix time from which `train.max_time` counts
    sweeper_direction: str = ""  # min or max, of a sweeper that is not the program's own

    @property
    def activity(self) -> Activity:
        """What `mode` does."""
        return ACTIVITIES[self.mode]

    @property
    def optimizers(self) -> dict[str, Optimizer]:
        """The optimizers, by the setting that they come from: each update's, or the only one."""
        if not self.updates:
            return {"optimizer": self.optimizer}
        optimizers = {}
        for number, update in enumerate(self.updates):
            optimizers[f"updates.{number}.optimizer"] = update.optimizer
        return optimizers

    def by_optimizer(self) -> list["Config"]:
        """Return the configuration with each of its optimizers as `optimizer`: for rules about one."""
        return [dataclasses.replace(self, optimizer=optimizer) for optimizer in self.optimizers.values()]

    def chooses(self, name: str) -> bool:
        """Return whether the command line names this section or setting, or one within it."""
        settings = [f"{setting}." for setting in self.given]
        return any(setting.startswith(f"{name}.") for setting in settings)

    @property
    def has_best(self) -> bool:
        """Whether one evaluation is better than another, so that there is a best checkpoint. With several updates no
        metric says so unless `objective` names one: what is good for a generator is bad for its discriminator.
        """
        return self.objective != "auto" or len(self.updates) < 2

    @property
    def continues(self) -> bool:
        """Whether the same command continues a run that was stopped: from its checkpoint, or after its rows."""
        return self.activity.writes_rows or (self.activity.trains and self.checkpointing.save)

    def to_dict(self) -> dict[str, Any]:
        """Return plain containers, as written to checkpoints and TensorBoard."""
        return dataclasses.asdict(self)

    def with_inference_batch_size(self) -> "Config":
        """Return the configuration with prediction's or generation's batch size as the evaluation micro-batch size."""
        if not self.activity.writes_rows:
            return self
        size = self.predict.batch_size if self.mode == "predict" else self.generate.batch_size
        batch = dataclasses.replace(self.batch, eval_micro_size=size)
        return dataclasses.replace(self, batch=batch)
