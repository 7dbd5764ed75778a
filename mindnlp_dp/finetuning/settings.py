"""This module reads the settings of a job from a YAML file and from flags; flags win, and unknown keys are errors.

It also defines the settings that all recipes have: those of a run, and those of parallelism, exchange and checkpoints.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional, TypeVar, get_type_hints

from mindnlp_dp.optim.optimizer_by_name import OWN_OPTIMIZERS
from mindnlp_dp.pipeline_schedules.schedules import SCHEDULES
from mindnlp_dp.runtime.mesh_spec import parse_mesh

# The name of the small models with random weights that the recipes train without a pretrained one.
FROM_SCRATCH = "tiny"
OPTIMIZERS = ("adamw", *OWN_OPTIMIZERS)
# MindNLP's; "cosine_with_min_lr" needs another setting, and is left out.
SCHEDULES_OF_RATES = (
    "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt",
    "reduce_lr_on_plateau",
)  # fmt: skip

# Characters of another library's message that an InputError repeats.
_LONGEST_REASON = 120


class InputError(ValueError):
    """Raised when a user's file, flag or data is wrong; the message says where, and what to do."""


def first_line(error: Exception) -> str:
    """Return the type of an error and the first line of its message, because libraries' messages can be very long."""
    said = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {said[:_LONGEST_REASON]}{'...' if len(said) > _LONGEST_REASON else ''}"


def setting(default: Any, text: str) -> Any:
    """Return a dataclass field with a help text, which is a flag and a key of a config file."""
    return field(default=default, metadata={"help": text})


@dataclass
class RunConfig:
    """The settings of a training run; every field is a key of a config file and a flag."""

    output_dir: str = setting("outputs/run", "output folder for the report, the plot and the model")
    num_epochs: float = setting(2.0, "passes over the training split")
    test_file: str = setting("", "the held-out split, in the same form")
    test_fraction: float = setting(0.0, "without a test file: the fraction of the training file that is held out")
    max_train_samples: int = setting(0, "train on so many samples, chosen at random by the seed; 0: all")
    max_steps: int = setting(-1, "maximum number of updates; -1: num_epochs decides")
    global_batch_size: int = setting(128, "number of samples in an update, over all ranks")
    eval_batch_size: int = setting(256, "number of samples of a rank in one evaluation step")
    learning_rate: float = setting(0.0, "peak learning rate, after warm-up; 0: the usual one for the model")
    warmup_ratio: float = setting(0.1, "fraction of the updates with learning rate warm-up")
    weight_decay: float = setting(0.01, "weight decay of matrices; biases and norms are not decayed")
    max_grad_norm: float = setting(1.0, "gradients are clipped to this norm; 0: no clipping")
    trust_pickle: bool = setting(False, "load weights that are not safetensors; unpickling runs their author's code")
    report_to: str = setting("none", "trackers of the log: tensorboard, swanlab, mlflow, some with commas, or all")
    peak_teraflops: float = setting(0.0, "what one device can do, in TFLOP/s, to log the MFU; 0: no MFU")
    logging_steps: int = setting(10, "number of updates between two log lines")
    seed: int = setting(42, "random seed of the weights, the order of the data and dropout")

    def __post_init__(self) -> None:
        self.learning_rate = self.learning_rate or self.usual_learning_rate()

    def usual_learning_rate(self) -> float:
        """Return the learning rate for this model, if the user gives none."""
        return 2e-3

    def validate(self) -> None:
        """Raise InputError for a setting that is out of range, or for two that exclude each other."""
        if not self.output_dir.strip():
            raise InputError(f"output_dir must name a folder, got {self.output_dir!r}")
        if self.test_file and self.test_fraction:
            raise InputError("--test-file and --test-fraction are two held-out splits; choose one")
        for name in ("global_batch_size", "eval_batch_size", "logging_steps"):
            self.check_at_least(1, name)
        self.check_at_least(0, "max_train_samples")
        if not 0 <= self.seed < 2**32:
            raise InputError(f"seed must be from 0 to {2**32 - 1}, got {self.seed}")
        for name in ("dropout", "lora_dropout"):
            if not 0 <= getattr(self, name, 0.0) < 1:
                raise InputError(f"{name} must be from 0 to 1, got {getattr(self, name)}")
        if not 0 <= self.test_fraction < 1:
            raise InputError(f"test_fraction must be from 0 to 1, got {self.test_fraction}")
        if not 0 < self.learning_rate < math.inf:
            raise InputError(f"learning_rate must be positive, or 0 for the usual one, got {self.learning_rate}")
        if self.peak_teraflops < 0:
            raise InputError(f"peak_teraflops must not be negative, got {self.peak_teraflops}")
        if self.max_steps == 0 or (self.max_steps < 0 and self.num_epochs <= 0):
            raise InputError("max_steps or num_epochs must be positive: there is nothing to train")

    def check_at_least(self, least: int, name: str) -> None:
        if getattr(self, name) < least:
            raise InputError(f"{name} must be at least {least}, got {getattr(self, name)}")

    @classmethod
    def replaced_by(cls, settings: Mapping[str, Any]) -> set[str]:
        """Return the settings of a lower level (defaults, file) that are void because of these."""
        return set()


@dataclass
class ParallelConfig(RunConfig):
    """The settings of a run's parallelism, gradient exchange, optimizer and checkpoints."""

    check: bool = setting(False, "check the settings and the files, without MindSpore, and do nothing else")
    micro_batch_size: int = setting(0, "samples of a rank in one backward pass; 0: global_batch_size / ranks")
    mesh: str = setting("", "how ranks share the work: dp=2,tp=2, fsdp=4, or by stage pp=2,dp=2|1,tp=1|2; empty: dp")
    pipeline_schedule: str = setting("1f1b", "schedule of the pipeline stages (pp): 1f1b, gpipe or eager-1f1b")
    pipeline_layers: str = setting("", "number of layers of each stage, such as 5,7; empty: split evenly")
    check_plan: bool = setting(False, "before training with a mesh, compare a batch with the whole model on each rank")
    gradient_checkpointing: bool = setting(False, "recompute the activations of layers in the backward pass")
    recompute_layers: str = setting("", "which of them: a number n, every n-th; or patterns of names; empty: all")
    group_by_length: bool = setting(False, "put rows of similar length into the same batch, to reduce padding")
    lr_scheduler: str = setting("linear", "the learning rate after warm-up: linear, cosine, constant_with_warmup, ...")
    eval_steps: int = setting(0, "number of updates between two evaluations; 0: once per epoch")
    save_best: str = setting(
        "", "end with the evaluated model that is best by this metric, such as loss; empty: the last"
    )
    early_stopping: int = setting(0, "stop after so many evaluations without a better one; 0: never")
    lora_rank: int = setting(0, "rank of LoRA's adapters; 0: all weights are trained")
    lora_alpha: float = setting(16.0, "the adapters are multiplied by lora_alpha / lora_rank")
    lora_dropout: float = setting(0.0, "dropout of the adapters' inputs")
    lora_targets: str = setting(
        "", "names of the layers with adapters, such as q_proj,v_proj; empty: all linear layers"
    )
    use_rslora: bool = setting(False, "rank-stabilized LoRA: multiply by lora_alpha / sqrt(lora_rank) instead")
    use_dora: bool = setting(False, "DoRA: also train the norms of the layers' weights")
    optimizer: str = setting("adamw", "adamw; muon; or lamb or lars, for large batches")
    save_steps: int = setting(0, "number of updates between two checkpoints, of which the last two are kept; 0: none")
    async_save: bool = setting(False, "write checkpoints while training continues; needs their size in memory")
    sharded_checkpoints: bool = setting(
        False, "every rank writes its part of the optimizer state; needs a shared folder"
    )
    save_initial_model: bool = setting(False, "write the model before training, too, to initial_model in output_dir")
    resume: bool = setting(False, "resume from the newest checkpoint in output_dir, if it has one")
    bucket_cap_mb: float = setting(0.0, "maximum size of a gradient bucket, in MiB; 0: 2 on CPUs, 25 on devices")
    overlap: str = setting("auto", "exchange gradients during the backward pass: true, false, or auto to find out")
    compression: str = setting("", "gradient compression: fp16, bf16 or powersgd; empty: none")
    powersgd_rank: int = setting(4, "the rank of PowerSGD's approximation")
    param_dtype: str = setting("", "the type that the model computes in: bfloat16 (devices) or float16; empty: float32")
    zero_stage: str = setting("auto", "ZeRO stage 0, 1, 2 or 3; auto: the fastest of 0 to 2")
    trace: str = setting("", "a file for the timeline of all ranks, for chrome://tracing or ui.perfetto.dev")
    profile: str = setting("", "FROM:TO: write a trace of these updates, with operators, to profile.json in output_dir")
    stats: bool = setting(False, "print the time of the gradient exchange for each update")
    tune_runtime: bool = setting(True, "on CPU, fit MindSpore's threads to the cores of each rank")
    kernels: str = setting("auto", "on CPU: auto, the fast kernels of this package; mindspore, its slower ones")
    matmul_precision: str = setting("auto", "on CPU: highest, or medium: products from inputs rounded to bfloat16")
    deterministic: str = setting("auto", "on a device: true, equal bits each time; false, faster; auto: true on Ascend")

    @property
    def metrics(self) -> tuple[str, ...]:
        """The names that ``save_best`` takes."""
        return ("loss",)

    @property
    def metric_to_keep(self) -> str:
        """The metric that decides on the best model; empty without one."""
        return self.save_best or ("loss" if self.early_stopping else "")

    def _check_fully_sharded(self, axes: list[str]) -> None:
        if self.param_dtype and [axis for axis in axes if axis not in ("dp", "fsdp", "sp")]:
            raise InputError(f"param_dtype with mesh={self.mesh}: it is for dp, fsdp and sp")
        if self.zero_stage != "3" and "fsdp" not in axes:
            return
        for name, is_wrong, expected in (
            ("mesh", "pp" in axes, "leave pp out"),
            ("mesh", "fsdp" not in axes and {*axes} - {"dp"}, "name the ranks that have shards, as in fsdp=2,tp=2"),
            ("zero_stage", self.zero_stage not in ("auto", "3"), "fsdp is stage 3"),
            ("optimizer", self.optimizer != "adamw", "ranks have shards of matrices: use adamw"),
            ("compression", self.compression, "leave it out"),
            ("check_plan", self.check_plan, "it is not supported with shards: leave it out"),
        ):
            if is_wrong:
                raise InputError(f"sharded weights (zero_stage=3, fsdp) with {name}={getattr(self, name)}: {expected}")

    def validate(self) -> None:
        super().validate()
        for name, choices in (
            ("optimizer", OPTIMIZERS),
            ("lr_scheduler", SCHEDULES_OF_RATES),
            ("save_best", ("", *self.metrics)),
            ("overlap", ("auto", "true", "false")),
            ("compression", ("", "fp16", "bf16", "powersgd")),
            ("param_dtype", ("", "bfloat16", "float16")),
            ("zero_stage", ("auto", "0", "1", "2", "3")),
            ("kernels", ("auto", "mindspore")),
            ("matmul_precision", ("auto", "highest", "medium")),
            ("deterministic", ("auto", "true", "false")),
            ("pipeline_schedule", SCHEDULES),
        ):
            if getattr(self, name) not in choices:
                shown = ", ".join(choice or "nothing" for choice in choices)
                raise InputError(f"{name} must be one of {shown}, got {getattr(self, name)!r}")
        with as_input_error():
            axes = [axis for axis, size in parse_mesh(self.mesh).items() if size != 1]
            self._check_fully_sharded(axes)
            parse_layers(self.pipeline_layers)
        if self.profile:
            # Imported here because it imports NumPy, which is slow.
            from mindnlp_dp.training.timeline import updates_of

            try:
                updates_of(self.profile)
            except ValueError as error:
                raise InputError(str(error)) from None
            if self.trace:
                raise InputError("trace and profile write the same timeline: give one of them")
        if self.recompute_layers and not self.gradient_checkpointing:
            raise InputError("recompute_layers is given, and gradient_checkpointing is not")
        self.check_at_least(1, "powersgd_rank")
        for name in (
            "micro_batch_size", "save_steps", "eval_steps", "early_stopping", "lora_rank",
        ):  # fmt: skip
            self.check_at_least(0, name)
        of_lora = [name for name in ("lora_targets", "use_rslora", "use_dora") if getattr(self, name)]
        if of_lora and not self.lora_rank:
            raise InputError(f"{of_lora[0]} changes LoRA's adapters, and lora_rank is 0")
        if not 0 <= self.lora_dropout < 1:
            raise InputError(f"lora_dropout must be from 0 to 1, got {self.lora_dropout}")
        if self.metric_to_keep and self.save_steps and (not self.eval_steps or self.save_steps % self.eval_steps):
            raise InputError(
                f"the best model is saved when it is evaluated: save_steps ({self.save_steps}) must be a multiple of "
                "eval_steps; give both, or leave save_steps out"
            )
        if not self.bucket_cap_mb >= 0:
            raise InputError(
                f"bucket_cap_mb must be positive, or 0 for the default, got {self.bucket_cap_mb}; "
                "benchmarks/bench_bucket_cap.py says what suits this machine"
            )


def parse_layers(text: str) -> list[int]:
    """Return ``"5,7"`` as [5, 7]; raise ValueError for text of another form.

    >>> parse_layers("5,7"), parse_layers("")
    ([5, 7], [])
    """
    parts = [part.strip() for part in text.split(",")] if text.strip() else []
    if not all(part.isdigit() for part in parts):
        raise ValueError(f"layers of stages are written as 5,7, got {text!r}")
    return [int(part) for part in parts]


def learning_rate_from_scratch(rate: float, hidden_size: int) -> float:
    """Return a learning rate for random weights that suits a width of 128; wider models need a smaller one.

    >>> learning_rate_from_scratch(2e-3, 64), learning_rate_from_scratch(2e-3, 1024)
    (0.002, 0.00025)
    """
    return rate * min(1.0, 128 / hidden_size)


T = TypeVar("T", bound=RunConfig)


def parse_config(
    kind: type[T],
    argv: Optional[Sequence[str]] = None,
    description: str = "",
    defaults: Optional[Mapping[str, Any]] = None,
    from_scratch: Optional[Mapping[str, Any]] = None,
) -> T:
    """Return the settings from flags, a ``--config FILE``, and a script's ``defaults``, in this order of precedence.

    Args:
        kind: a subclass of :class:`RunConfig`; only its fields are accepted as flags.
        from_scratch: additional defaults for the model ``FROM_SCRATCH``, which is not pretrained.

    Raises:
        InputError: the file is missing, is not a YAML mapping, or has an unknown key or a value of the wrong
            type; or a setting is out of range.
    """
    flags = vars(flag_parser(kind, description, defaults).parse_args(argv))
    file = flags.pop("config", None)
    from_file = read_config_file(file, kind) if file else {}
    defaults = dict(defaults or {})
    if {**defaults, **from_file, **flags}.get("model") == FROM_SCRATCH:
        defaults.update(from_scratch or {})
    chosen: dict[str, Any] = {}
    for settings in (defaults, from_file, flags):
        replaced = kind.replaced_by(settings)
        chosen = {**{name: value for name, value in chosen.items() if name not in replaced}, **settings}
    config = kind(**chosen)
    config.validate()
    return config


def flag_parser(
    kind: type[RunConfig], description: str = "", defaults: Optional[Mapping[str, Any]] = None
) -> argparse.ArgumentParser:
    """Return the parser of the flags, which needs only the standard library; scripts/quickstart.sh uses it, too."""
    parser = argparse.ArgumentParser(description=description, argument_default=argparse.SUPPRESS)
    parser.add_argument("--config", metavar="FILE", help="YAML with any of the settings below; flags win over it")
    types = get_type_hints(kind)
    for setting in dataclasses.fields(kind):
        value = types[setting.name]
        # A boolean flag without a value is true: --stats means --stats true.
        options: dict[str, Any] = {"type": _boolean, "nargs": "?", "const": True} if value is bool else {"type": value}
        parser.add_argument(
            f"--{setting.name.replace('_', '-')}",
            metavar=value.__name__.upper(),
            help=f"{setting.metadata['help']} (default: {(defaults or {}).get(setting.name, setting.default)!r})",
            **options,
        )
    return parser


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"expected true or false, got {text}")
    return text.lower() == "true"


def read_config_file(path: str, kind: type[RunConfig]) -> dict[str, Any]:
    """Return the settings of a YAML file, checked against the fields of ``kind``."""
    import yaml

    try:
        with open(path, encoding="utf-8-sig") as file:
            settings = yaml.safe_load(file)
    except FileNotFoundError:
        raise InputError(f"{path}: the config file does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: the config file cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise InputError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(settings, dict):
        raise InputError(f"{path}: expected lines of the form `key: value`")
    types = get_type_hints(kind)
    for key, value in settings.items():
        if key not in types:
            raise InputError(f"{path}: unknown key {key!r}; known are {', '.join(sorted(types))}")
        # YAML reads 2e-3 as a string and 2 as an integer.
        if types[key] is float and isinstance(value, (int, str)) and not isinstance(value, bool):
            try:
                settings[key] = float(value)
            except ValueError:
                pass
        if types[key] is str and type(value) in (int, bool):
            # A number or true as text: the ZeRO stage, every n-th layer, and what may also be "auto".
            settings[key] = str(value).lower()
        if type(settings[key]) is not types[key]:
            raise InputError(f"{path}: {key} must be a {types[key].__name__}, got {value!r}")
    return settings


@contextlib.contextmanager
def as_input_error(kind: type[ValueError] = ValueError) -> Iterator[None]:
    """Convert an error that settings cause (batches that do not divide, too many ranks) to an InputError."""
    try:
        yield
    except kind as error:
        raise InputError(str(error)) from None
