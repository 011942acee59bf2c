"""What a training framework can do, as the data of a profile: `can` in `trainers/*.yaml`."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from foretoken.domain.errors import FieldViolation, InvalidRequestError
from foretoken.domain.frameworks.capability import Conflict, Has, find_unknown

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
    tells that ep does not divide the ranks that split experts' states, `uneven_sequence` that
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
