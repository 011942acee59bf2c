"""What can be measured on a device, and what came of it: operators, model graphs, whole steps."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from foretoken.domain.alias import settle_devices
from foretoken.domain.errors import FieldViolation, InvalidRequestError
from foretoken.domain.measurements.estimate import DType, OperatorCall
from foretoken.domain.measurements.training_truth import ModuleTimes
from foretoken.domain.models.architecture import ModelArchitecture
from foretoken.domain.requests.option import check_options, describe, flag, option
from foretoken.domain.results.methods import ResultMethods

# Which of an operator's kernels are timed: the one a framework would choose, or every one here.
KERNEL_CHOICES = ("default", "all")
# Whether inputs come from memory (`cold`), or the same ones again and again (`warm`).
CACHE_STATES = ("cold", "warm", "both")


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileRequest:
    """What to profile: each operator's own sweep, the shapes of models, or exactly some calls.

    Empty `operators` means all. With `models` the sweep is what serving them in each of the
    `tp_sizes` (1 if empty) needs, with `has_training` training them, too. `calls` replaces
    every sweep. Empty `dtypes` takes those a device is used in. `quick` takes about a minute.

    `skip_covered` leaves out points the catalog already has for this device and software.
    `name` tells profiles apart: one of the same name goes on where it was interrupted, its repeats
    and failures included. Empty, it is made of the request, or new where nothing is skipped.

    `kernels` is one of `KERNEL_CHOICES`, `cache` one of `CACHE_STATES`. `num_ranks` limits the
    group sizes of collectives (0: all devices here). Times in s; `time_cap_s` 0 is no limit.
    """

    device: str = field(
        metadata=describe("Device, by its catalog name: see `foretoken profile devices`.")
    )
    operators: tuple[str, ...] = option(
        (), "Only this operator. Repeatable.", names=("--operator",), syntax="words"
    )
    quick: bool = flag(
        "Few points, timed less precisely: about a minute.",
    )
    skip_covered: bool = flag(
        "Measure points the catalog already has, too.",
        is_on=True,
        names=("--again",),
        syntax="off",
    )
    seed: int = option(0, "Decides inputs, order and repeats.", minimum=0)
    time_cap_s: float = option(
        0.0, "Stop after this many seconds; what is left is counted (0: no cap).", minimum=0
    )
    name: str = option("", "Name of the profile: one of the same name goes on where it stopped.")
    models: tuple[ModelArchitecture, ...] = option(
        (),
        "Time what serving this model needs: a preset (`foretoken list models`) or the path of"
        " a Hugging Face `config.json`. Repeatable. Without, each operator's own sweep.",
        names=("--model",),
        syntax="models",
    )
    tp_sizes: tuple[int, ...] = option(
        (),
        "With --model: tensor-parallel sizes, `1,2,4,8` or `1:8`. Default: 1.",
        minimum=1,
        names=("--tp",),
    )
    has_training: bool = flag(
        "With --model: what training it needs, too.",
    )
    dtypes: tuple[DType, ...] = option(
        (), "Number format, instead of the device's usual ones. Repeatable.", names=("--dtype",)
    )
    calls: tuple[OperatorCall, ...] = option(
        (),
        "Time exactly the points of this CSV file, as `foretoken plan --points-csv` writes it.",
        names=("--points",),
        syntax="calls",
    )
    kernels: str = option(
        "default",
        "`default`: the kernel a framework would choose; `all`: every one here.",
        choices=KERNEL_CHOICES,
    )
    cache: str = option(
        "cold",
        "Inputs come from memory (`cold`), stay in the cache (`warm`), `both`.",
        choices=CACHE_STATES,
    )
    num_ranks: int = 0

    def __post_init__(self) -> None:
        """Check what does not depend on the device."""
        settle_devices(self, "device")
        check_options(self, "profile", {"num_ranks": (self.num_ranks >= 0, "must not be negative")})


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorOutline:
    """The part of one operator in a profile to come. `estimated_s` is for what is to be timed."""

    operator: str
    num_calls: int
    num_covered: int
    estimated_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileOutline:
    """What a profile would time, and for how long.

    `num_calls` are to be timed; `num_covered` are known already, `num_too_long` take longer than
    a call may, `num_failing` are expected not to fit the memory and will be failed rows,
    `num_unsupported` have no kernel here. `notes` say what was left out and why.
    """

    name: str
    device: str
    num_calls: int = 0
    num_covered: int = 0
    num_too_long: int = 0
    num_failing: int = 0
    estimated_s: float = 0.0
    operators: tuple[OperatorOutline, ...] = ()
    num_unsupported: int = 0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorProfile:
    """How timing one operator went.

    `interval_ratio` is the median, over its points, of half the width of the 95 % interval of a
    point's median over that median.
    """

    operator: str
    num_measured: int = 0
    num_failed: int = 0
    num_flagged: int = 0
    wall_s: float = 0.0
    interval_ratio: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class ProfileReport(ResultMethods):
    """Outcome of a profiling run.

    `num_skipped` counts what was known, too long, or left for lack of time. Of the points timed
    twice at different moments, `repeat_median_ratio` and `repeat_p90_ratio` are the median and the
    90th percentile of the difference of the two medians over their mean. `notes` say what was left
    out of the plan and why.
    """

    run_id: str = ""
    device: str = ""
    num_planned: int = 0
    num_measured: int = 0
    num_failed: int = 0
    num_skipped: int = 0
    wall_s: float = 0.0
    name: str = ""
    num_flagged: int = 0
    num_repeats: int = 0
    repeat_median_ratio: float = 0.0
    repeat_p90_ratio: float = 0.0
    operators: tuple[OperatorProfile, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphRequest:
    """Trace a Hugging Face model and time the nodes of its graph.

    `config_json` is the text of its `config.json`, `model` what rows and files call it. Micro
    batches of 1, 2, 4, ... samples are timed until the memory is full, or up to
    `micro_batch_size_max`; for each of `tp_sizes` (1 if empty) with the shapes of one rank.
    `num_layers` is how
    many layers are built (0: all, or as many as fit); the others are taken to be like these.
    """

    device: str = field(
        metadata=describe("Device of this machine, by its catalog name: `cpu`, `h200_sxm`.")
    )
    model: str = field(
        metadata=describe(
            "A model's `config.json` or its folder, or a preset's name.", argument="model"
        )
    )
    config_json: str
    sequence_length: int = option(
        2048, "Tokens of every sequence.", minimum=1, maximum=2**20, names=("--seq-len",)
    )
    tp_sizes: tuple[int, ...] = option(
        (),
        "Tensor-parallel sizes, `1,2,4`: the shapes of one rank of each (default: 1).",
        minimum=1,
        names=("--tp",),
    )
    micro_batch_size_max: int = 128
    num_layers: int = 0
    dtype: DType = option(
        DType.BF16, "Number format; fp32 on a CPU and bf16 elsewhere if left out."
    )
    has_backward: bool = True
    seed: int = 0
    time_cap_s: float = 0.0

    def __post_init__(self) -> None:
        """Check the sizes."""
        settle_devices(self, "device")
        check_options(self, "graph profile")


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class GraphReport(ResultMethods):
    """A model's profile by module: one `ModuleTimes` for each tensor-parallel size.

    `num_layers_timed` of `num_layers` were built and timed. `notes` say what was extrapolated,
    what failed and why. `architecture_json` is the model as layers of kinds, which `load_model`
    reads; empty where its modules are of no known kinds.
    """

    run_id: str = ""
    device: str = ""
    model: str = ""
    num_layers: int = 0
    num_layers_timed: int = 0
    num_nodes: int = 0
    profiles: tuple[ModuleTimes, ...] = ()
    notes: tuple[str, ...] = ()
    wall_s: float = 0.0
    architecture_json: str = ""


# What a whole step does: new sequences, one token more for each sequence, or forward and backward
# passes with an optimizer update.
STEP_KINDS = ("prefill", "decode", "training")
# How a step is run: as written, compiled, or compiled and replayed as a CUDA graph.
STEP_MODES = ("eager", "compiled", "graph")


@dataclass(frozen=True, kw_only=True, slots=True)
class ClosureStep:
    """One whole step of a model: `batch_size` sequences of `num_tokens` tokens.

    In a decoding step `num_tokens` is the context of each sequence before its new token.
    """

    kind: str
    batch_size: int
    num_tokens: int
    mode: str = "eager"

    def __post_init__(self) -> None:
        """Check names and sizes."""
        violations = []
        if self.kind not in STEP_KINDS:
            violations.append(FieldViolation("kind", f"must be one of {', '.join(STEP_KINDS)}"))
        if self.mode not in STEP_MODES:
            violations.append(FieldViolation("mode", f"must be one of {', '.join(STEP_MODES)}"))
        violations += [
            FieldViolation(name, "must be at least 1")
            for name in ("batch_size", "num_tokens")
            if getattr(self, name) < 1
        ]
        if violations:
            raise InvalidRequestError.of_violations(violations, "step")


@dataclass(frozen=True, kw_only=True, slots=True)
class ClosureRequest:
    """Time whole steps of a Hugging Face model with random weights.

    `config_json` is the text of its `config.json`; `num_layers` shortens it (0: as it is).
    Without `steps` some that fit the device are chosen, fewer and smaller with `quick`.
    """

    device: str = field(
        metadata=describe("Device of this machine, by its catalog name: `cpu`, `h200_sxm`.")
    )
    model: str = field(
        metadata=describe(
            "A model's `config.json` or its folder, or a preset's name.", argument="model"
        )
    )
    config_json: str
    steps: tuple[ClosureStep, ...] = option(
        (),
        "KIND:SEQUENCESxTOKENS[:MODE], such as `prefill:1x512`, `decode:8x1024:graph`,"
        " `training:2x256:compiled`. Repeatable; some that fit the device if left out.",
        names=("--step",),
        syntax="steps",
    )
    num_layers: int = option(0, "Build so many layers only (0: as many as it has).", minimum=0)
    dtype: DType = option(
        DType.BF16, "Number format; fp32 on a CPU and bf16 elsewhere if left out."
    )
    quick: bool = flag("Fewer steps and fewer samples of each.")
    seed: int = 0
    time_cap_s: float = option(
        0.0, "Begin no step after this many seconds; those left are named (0: no cap).", minimum=0
    )

    def __post_init__(self) -> None:
        """Check the sizes."""
        settle_devices(self, "device")
        check_options(self, "whole steps")


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredStep:
    """A whole step as it was measured; times in µs, 0 where nothing says.

    `latency_us_*` are wall times of the step, ended by a synchronisation. `device_us` is the time
    kernels ran on the device, `host_us` what the host took to queue them. `status` is `ok` or
    `failed` with a `reason`.
    """

    step: ClosureStep
    latency_us_median: float = 0.0
    latency_us_p10: float = 0.0
    latency_us_p90: float = 0.0
    num_samples: int = 0
    device_us: float = 0.0
    host_us: float = 0.0
    num_kernels: int = 0
    memory_bytes: float = 0.0
    status: str = "ok"
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class ClosureReport(ResultMethods):
    """Whole steps of one model on one device: truth to hold predictions to, never trained on.

    The catalog keeps it as an artifact of the kind `closure` under `name`. `architecture` is the
    model as it was run, with the layers it had. `attention` and `norm` name what ran as such.
    """

    name: str = ""
    device: str = ""
    model: str = ""
    architecture: ModelArchitecture | None = None
    dtype: DType = DType.BF16
    framework: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    created_at: str = ""
    steps: tuple[MeasuredStep, ...] = ()
    wall_s: float = 0.0


# Under these kinds the catalog keeps reports of graphs and of whole steps.
GRAPH_KIND = "graph_report"
CLOSURE_KIND = "closure"
# Under this key the environment of whole steps says which were disturbed, and by what.
DISTURBED_KEY = "disturbed"
