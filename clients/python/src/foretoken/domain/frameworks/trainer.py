"""The software that trains: its rules as a data file, what it can, what a user changes.

A profile says which kernels a framework runs for a layer, in which formats it keeps what, what it
hides behind computation, and how its pipeline sends. One file each in `trainers/`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from foretoken.domain import schema
from foretoken.domain.errors import FieldViolation, InvalidRequestError, UnknownPluginError
from foretoken.domain.frameworks.capability import Conflict, Has, find_unknown
from foretoken.domain.frameworks.profile_folder import load_profiles, read_rule
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.requests.option import option

_OVERLAPS = (
    *("gradient_reduction", "parameter_gather", "tensor_collectives", "tensor_gradients"),
    *("expert_exchange", "context_exchange"),
)
OVERLAP_RULES = tuple(f"overlaps_{name}" for name in _OVERLAPS)
# By aspect, the key of a scenario to change where a framework has not its value.
ASPECTS: Mapping[str, str] = {
    **{axis: f"layout.{axis}" for axis in ("tp", "pp", "cp", "ep")},
    "virtual_stages": "virtual_stages",
    "pipeline_schedule": "pipeline_schedule",
    "uneven_layers": "stage_layers",
    "sequence_parallel": "sequence_parallel",
    "uneven_sequence": "sequence_length",
    "context_parallel": "context_parallel",
    "weight_parallel": "weight_parallel",
    "zero_stage": "zero_stage",
    "shards": "zero_stage",
    "partial_shards": "shard_degree",
    "uneven_shards": "shard_degree",
    "experts": "model.moe",
    "expert_tp": "expert_tp",
    "uneven_experts": "layout.ep",
    "drops_tokens": "moe_capacity_factor",
    "recompute": "recompute",
    "recompute_modules": "recompute_modules",
    "partial_recompute": "recompute_layers",
    "partitions_activations": "partitions_activations",
    "dtype": "dtype",
    **{rule: f"trainer.rules.{rule}" for rule in OVERLAP_RULES},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerCapabilities:
    """What a framework can do.

    `has` are the values of an aspect that there are (aspects that are not named: all). Degrees are
    numbers, or `more` for all above 1. `virtual_stages` are the chunks of a rank, and an
    `interleaved` schedule of one chunk is `one_f_one_b`. `sequence_parallel` is true where tp is
    above 1. `context_parallel` is `none` where cp is 1. `shards` are the ranks that states are
    split over (1 without ZeRO), `partial_shards` that they are some of those that hold the same,
    `uneven_shards` that cp does not divide them. `expert_tp` is `none` without experts, else `tp`,
    `one` or `part`: experts split as all else, not at all, or over some of tp. `uneven_experts`
    tells that ep does not divide the ranks that split experts' states, `drops_tokens` that experts
    have a capacity, `uneven_sequence` that
    2 * cp * tp does not divide a sequence, `uneven_layers` that chunks of layers differ,
    `partial_recompute` that some layers of a chunk are recomputed. `recompute_modules` are those of
    `selective`, and the other names are fields of a scenario or of a trainer's profile.

    `switches` are the `overlaps_` rules that a user of the framework turns on and off (none named:
    all); the others are as its profile says. `conflicts` are values there are, but not together.
    `source` says where this was looked up.
    """

    source: str = ""
    has: Has = field(default_factory=dict)
    switches: tuple[str, ...] | None = None
    conflicts: tuple[Conflict, ...] = ()

    def __post_init__(self) -> None:
        """Refuse aspects and rules there are not."""
        violations = list(_violations(self))
        if violations:
            raise InvalidRequestError.of_violations(violations, "can")

    def is_switchable(self, rule: str) -> bool:
        """Tell whether users turn an `overlaps_` rule on and off."""
        return self.switches is None or rule in self.switches


def _violations(can: TrainerCapabilities) -> Iterator[FieldViolation]:
    yield from find_unknown(can.has, can.conflicts, tuple(ASPECTS))
    for rule in can.switches or ():
        if rule not in OVERLAP_RULES:
            yield FieldViolation("switches", f"{rule} is none of {', '.join(OVERLAP_RULES)}")


DEFAULT_TRAINER = "plain"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerProfile:
    """What a training framework does, by its own rules.

    A file that `extends` another profile says what differs from it; see `load_profiles`.

    `software` is what runs its kernels, whose measurements come first (empty: any).

    Kernels: `attention` is `flash` (one fused kernel) or `unfused` (scores, softmax and values
    apart); a fused kernel takes `attention_time_ratio` times as long as those measured. Where
    the trainer's own software was not measured, and its `attention_library` was published for
    the device (`cudnn`, `flash_2`, `flash_3`; empty: servers' kernels stand in), it is as fast
    as that, and products in 8 bit are those of `fp8_software` (empty: of any), whose rows hold
    the conversion of their input, which is taken off. `gradient_accumulation` says how a micro
    batch's weight gradients are added up: in the matrix product itself (`fused`), by kernels of
    their own (`separate`), or by those after a conversion to fp32 (`converted`). An RMS norm,
    or the rotation of heads, is one kernel with `fuses_norm`, `fuses_rope`, else a chain of
    them; with `casts_norm_inputs` norms of a layer work on fp32, with
    `fuses_norm_quantize` they write what a product in 8 bit reads. Unless `fuses_gate`, the
    activation of a gated MLP and its product with the other half are two kernels, and the
    weights of both halves two tensors. Unless `fuses_bias_activation`, the bias of an MLP and
    its activation are two, and unless `fuses_residual` so are bias, dropout and the addition to
    the residual stream. Unless `fuses_permutation`, rows of tokens are added up by index, which is
    slower than one kernel. With `pads_experts` rows of experts in 8 bit are copied to rows that
    their products can have, and back. A `router` chooses experts by a kernel (`fused`), by a chain
    of them (`unfused`), or all that it and the counts of tokens launch is one graph (`captured`).
    Activations are dropped out with `has_dropout`, and by kernels laid out
    anew with `has_copy_kernels` (the attention's output, the gradients of the parts of a fused
    projection). With `has_mlp_bias` MLPs without a gate have biases whatever the model says.
    Parallel branches of a layer have a norm each with `has_branch_norms`; with
    `sums_branches_first` tensor parallelism reduces their sum, not each. `casts_logits` makes
    fp32 logits by a kernel before the loss. Unless `slowed_by_power` products and attention are
    as fast for long as in a burst, as on made-up batches of zeros, which draw little power.

    Step: before data-parallel ranks add gradients up, `checks_gradients` takes the norm of a rank's
    own to find what is no number, and `scales_gradients` multiplies them by one over the number of
    ranks. `flattens_gradients` gathers gradients in a buffer to reduce and spreads the result; with
    `reduces_whole_gradients` ranks that shard optimizer states (ZeRO 1) sum all gradients all the
    same, not each its share. With `broadcasts_parameters` every tensor has one owner, which sends
    it to the others, owner after owner. With `gathers_again` parameters that ZeRO 3 gathered to
    recompute a layer are gathered once more for its backward pass. `selective_modules` is what
    selective recomputation runs again unless a scenario says; with `ends_recompute_early` a layer
    that is recomputed stops where nothing more of it is needed, and with `keeps_unread_outputs` one
    recomputed by operator keeps what no backward operator reads. `scales_loss` looks for
    overflows and divides gradients by the loss scale, `clips_gradients` takes their norm; with
    `unscales_first` that division and the clipping are two passes. With `zeroes_gradients` their
    buffer is filled with zeros before each step. Adam is one kernel with `fuses_optimizer`, else
    one for each of its operations; with `copies_parameters` another writes them in 16 bit. With
    `converts_moments` Adam works on moments in fp32, and those that are kept in 16 bit are
    converted before and after it.

    Formats: `gradient_dtype` is what gradients are summed up and reduced in (none: the compute
    format), `master_dtype` that of the optimizer's copy of the weights, `moment_dtype` that of its
    two moments. With `keeps_remainders` an optimizer whose moments are in 16 bit keeps of that copy
    what weights of 16 bit lack, and writes them itself. Weights that are multiplied in 8 bit are
    kept in 16 besides, or with `keeps_narrow_weights` in 8 bit alone, in which they are gathered
    too. What products read of them, and its transpose, stays for a step with
    `caches_weight_copies`.

    Communication: `transfers` between stages are `rendezvous` (both ends must have arrived) or
    `buffered`, in an interleaved pipeline `interleaved_transfers` (empty: no other ones); with
    `has_duplex_links` both directions of an exchange go at once. With
    `scatters_stage_transfers` each tensor-parallel rank sends its part and the receivers gather
    them; with `sends_attention_mask` a mask of each sequence's length squared goes along. Tokens go
    to their experts once for each of them, or with `sends_tokens_once` once for each node that has
    any (inside one node: each rank), where a device passes on no more than `forward_ratio` times
    what its port receives (0: as much as its links carry). Where `nodes_per_token` is not 0, its
    router lets a token reach no more nodes (0: as the model's groups of experts say), which only
    such an exchange uses. With `sends_scores` the router's weights, which experts apply, follow
    tokens that are sent for each expert by an exchange of their own. `dispatch_dtype` is the
    format they are sent in (none: that of activations, in which sums come back). What the
    `overlaps_` rules name is hidden behind computation, which it slows down by
    `overlap_slowdown_ratio`; `overlaps_tensor_gradients` names the tensor collectives of the
    backward pass alone, behind the weight gradients. Gradients are reduced in buckets of
    `bucket_elements` (0: one).

    Host: `forward_gap_us` and `backward_gap_us` are what eager launches leave between the kernels
    of one layer, in µs; `step_gap_us` what a step costs on the host besides. The host needs
    `launch_us` for each operator, for a chain in proportion to its kernels, so a layer of small
    ones takes at least that of all of them,
    `module_call_us` more for a forward or backward pass of a matrix product's module, and
    `expert_call_us` more for each expert's product, and in 8 bit for what it converts, where
    experts are multiplied call by call, whose weights' gradients each have a hook of
    `expert_hook_us`. With `waits_for_counts` it waits in forward passes for the
    counts of tokens that experts get, before which it cannot launch their exchange. Where ZeRO 3
    exchanges lists of tensors, one entry a rank, the device waits `list_rank_us` for each weight
    and rank.

    Memory: with `overwrites_logits` the loss keeps their gradient in place of the logits, otherwise
    a softmax in fp32, which their gradient replaces with `overwrites_softmax`. With
    `keeps_gradient_placeholders` a fused accumulation hands autograd an empty gradient of each
    shape of weight, which stays allocated. With `trains_master_weights` the weights themselves have
    `master_dtype`, and layers cast them as they need them. `workspace_bytes` are what libraries
    take of the allocator for good, `expert_workspace_bytes` what the grouped products of experts
    take besides. An allocator reserves `reserved_ratio` times what tensors occupy; `context_bytes`
    of the device it cannot have (0: what driver, context and communicators take by
    `memory_headroom`).

    `can` bounds the strategies the framework has; nothing else depends on it.
    """

    name: str
    framework: str = ""
    extends: str = ""
    versions: str = ""
    source: str = ""
    software: str = ""
    attention: str = "flash"
    attention_time_ratio: float = 1.0
    attention_library: str = ""
    fp8_software: str = ""
    gradient_accumulation: str = "fused"
    fuses_norm: bool = True
    fuses_rope: bool = True
    casts_norm_inputs: bool = False
    fuses_norm_quantize: bool = False
    fuses_gate: bool = True
    fuses_bias_activation: bool = True
    fuses_residual: bool = True
    fuses_permutation: bool = True
    pads_experts: bool = False
    router: str = "fused"
    has_dropout: bool = False
    has_copy_kernels: bool = False
    has_mlp_bias: bool = False
    has_branch_norms: bool = False
    sums_branches_first: bool = False
    casts_logits: bool = False
    slowed_by_power: bool = True
    vocab_multiple: int = 1
    flattens_gradients: bool = False
    reduces_whole_gradients: bool = False
    broadcasts_parameters: bool = False
    gathers_again: bool = False
    selective_modules: tuple[str, ...] = ("core_attention",)
    ends_recompute_early: bool = False
    keeps_unread_outputs: bool = False
    fuses_optimizer: bool = True
    scales_loss: bool = False
    clips_gradients: bool = True
    unscales_first: bool = False
    zeroes_gradients: bool = False
    copies_parameters: bool = False
    converts_moments: bool = False
    checks_gradients: bool = False
    scales_gradients: bool = False
    gradient_dtype: DType | None = DType.FP32
    master_dtype: DType = DType.FP32
    moment_dtype: DType = DType.FP32
    keeps_remainders: bool = False
    keeps_narrow_weights: bool = False
    caches_weight_copies: bool = True
    transfers: str = "rendezvous"
    interleaved_transfers: str = ""
    has_duplex_links: bool = True
    scatters_stage_transfers: bool = False
    sends_attention_mask: bool = False
    overlaps_gradient_reduction: bool = False
    overlaps_parameter_gather: bool = False
    overlaps_tensor_collectives: bool = False
    overlaps_tensor_gradients: bool = False
    overlaps_expert_exchange: bool = False
    overlaps_context_exchange: bool = False
    sends_tokens_once: bool = False
    sends_scores: bool = False
    forward_ratio: float = 0.0
    nodes_per_token: int = 0
    dispatch_dtype: DType | None = None
    overlap_slowdown_ratio: float = 1.0
    bucket_elements: int = 0
    forward_gap_us: float = 0.0
    backward_gap_us: float = 0.0
    step_gap_us: float = 0.0
    launch_us: float = 0.0
    module_call_us: float = 0.0
    expert_call_us: float = 0.0
    expert_hook_us: float = 0.0
    waits_for_counts: bool = False
    list_rank_us: float = 0.0
    overwrites_logits: bool = False
    overwrites_softmax: bool = True
    keeps_gradient_placeholders: bool = False
    trains_master_weights: bool = False
    workspace_bytes: int = 0
    expert_workspace_bytes: int = 0
    reserved_ratio: float = 1.048
    context_bytes: int = 0
    can: TrainerCapabilities = field(default_factory=TrainerCapabilities, hash=False)

    def __post_init__(self) -> None:
        """Refuse rules no framework can follow."""
        violations = [
            FieldViolation(name, f"must be one of {', '.join(allowed)}")
            for name, allowed in _ALLOWED.items()
            if getattr(self, name) not in allowed
        ]
        violations += [
            FieldViolation(name, f"must be at least {least}")
            for name, least in _LEAST.items()
            if not getattr(self, name) >= least
        ]
        if violations:
            raise InvalidRequestError.of_violations(violations, f"trainer {self.name}")

    def splits_masters(self, dtype: DType) -> bool:
        """Tell whether an optimizer's copies of weights in a format are what those lack."""
        is_16_bit = self.moment_dtype is not DType.FP32 and dtype in (DType.BF16, DType.FP16)
        return is_16_bit and self.keeps_remainders

    def reads_any_gradients(self, dtype: DType) -> bool:
        """Tell whether an optimizer reads gradients of any format, as it does moments."""
        has_wide_masters = self.keeps_remainders and not self.splits_masters(dtype)
        return self.moment_dtype is not DType.FP32 and not has_wide_masters

    def transfers_between(self, num_chunks: int) -> str:
        """Return how stages send of which each has so many chunks of layers."""
        return (self.interleaved_transfers if num_chunks > 1 else "") or self.transfers


# Fields that say what a profile is of: no rules, which change what a step takes.
_DESCRIPTION = ("name", "framework", "extends", "versions", "source", "software")
_ALLOWED = {
    "attention": ("flash", "unfused"),
    "attention_library": ("", "cudnn", "flash_2", "flash_3"),
    "gradient_accumulation": ("fused", "separate", "converted"),
    "router": ("fused", "unfused", "captured"),
    "transfers": ("rendezvous", "buffered"),
    "interleaved_transfers": ("", "rendezvous", "buffered"),
}
_LEAST = {
    "attention_time_ratio": 1,
    "overlap_slowdown_ratio": 1,
    "forward_ratio": 0,
    "nodes_per_token": 0,
    "bucket_elements": 0,
    "vocab_multiple": 1,
    "forward_gap_us": 0,
    "backward_gap_us": 0,
    "step_gap_us": 0,
    "launch_us": 0,
    "module_call_us": 0,
    "expert_call_us": 0,
    "expert_hook_us": 0,
    "list_rank_us": 0,
    "workspace_bytes": 0,
    "expert_workspace_bytes": 0,
    "reserved_ratio": 1,
    "context_bytes": 0,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerSpec:
    """The framework of a scenario: a profile, and what differs from it.

    `rules` changes any rule of `TrainerProfile` by its name, its value as YAML:
    `{overlaps_gradient_reduction: true}`; what only describes a profile is none. `{can: "{}"}`
    lifts the bounds of what the framework can do.
    """

    profile: str = option(DEFAULT_TRAINER, "`foretoken list trainers`")
    rules: Mapping[str, str] = option(
        {}, "any rule of the profile: {overlaps_gradient_reduction: true}"
    )

    def resolve(self) -> TrainerProfile:
        """Return the profile with this trainer's changes.

        Raises:
            UnknownPluginError: no such profile; the message names the nearest.
            InvalidRequestError: a rule there is not, or a value it cannot have.

        """
        return _resolve(self.profile, tuple(sorted(self.rules.items())))


@cache
def _resolve(name: str, rules: tuple[tuple[str, str], ...]) -> TrainerProfile:
    profile = find_trainer(name)
    fixed = [
        FieldViolation(f"trainer.rules.{rule}", "tells of the profile and is no rule")
        for rule, _ in rules
        if rule in _DESCRIPTION
    ]
    if fixed:
        raise InvalidRequestError.of_violations(fixed)
    changes: dict[str, Any] = {
        name: read_rule(text, f"trainer.rules.{name}") for name, text in rules
    }
    content = {**schema.encode(profile), **changes}
    return schema.decode(TrainerProfile, content, "trainer.rules")


@cache
def all_trainers() -> dict[str, TrainerProfile]:
    """Return every profile by name: one file each in `trainers/`."""
    return load_profiles(TrainerProfile, "trainers")


def find_trainer(name: str) -> TrainerProfile:
    """Return the profile of that name.

    Raises:
        UnknownPluginError: there is none; the message names the nearest.

    """
    return UnknownPluginError.look_up(name, all_trainers(), "trainer.profile", "trainer")
