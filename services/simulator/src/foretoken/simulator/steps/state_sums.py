"""What ranks with the same parameters exchange once a step: sums of gradients, new parameters.

The rules are over numbers of one chunk, or columns of cases. Gradients are summed once a step, or
for every micro batch where a rank keeps only its share of them (ZeRO 2 and 3); parameters are
gathered after the update (1 and 2) or before each pass of a layer (3). In a pipeline FSDP2 does
both once a step. With fewer shards than ranks (HSDP) the shards' sums are summed again over the
replicas.
Source: Rajbhandari et al., ZeRO, 2020; Zhao et al., "PyTorch FSDP", 2023, section 3.2.2;
Megatron-Core, `distributed/finalize_model_grads.py`.
"""

from dataclasses import dataclass

from foretoken.domain.frameworks.trainer import TrainerProfile
from foretoken.domain.lowering.expert_layer import larger
from foretoken.domain.units import Quantity, ceil_divide, smaller
from foretoken.simulator.steps.sharding import StateRanks


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HeldParameters:
    """Parameters of a group, dense or of experts, as a rank keeps them before they are sharded.

    They are `num_params` in `num_tensors` tensors, `num_layer_params` of them in the largest layer
    of the chunk, and `num_narrow` are multiplied in 8 bit.
    """

    num_params: Quantity
    num_layer_params: Quantity
    num_tensors: Quantity
    num_narrow: Quantity
    ranks: StateRanks


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StateCall:
    """A collective of so many elements, `count` times, over `degree` ranks `stride` apart."""

    role: str = ""
    axis: str = "dp"
    operator: str
    elements: Quantity
    count: Quantity
    degree: Quantity
    stride: Quantity


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StateRule:
    """The ZeRO `stage`, 0 where nothing is split; with `is_once` stage 3 exchanges once a step."""

    trainer: TrainerProfile
    stage: Quantity
    is_once: Quantity

    def sum_gradients(self, held: HeldParameters) -> list[StateCall]:
        """Return the sums of gradients that are made once a step, in buckets.

        A bucket holds whole gradients; of sums that are scattered each rank has its share.
        Gradients that are scattered layer by layer are summed over replicas so, too.
        """
        num_params, ranks = held.num_params, held.ranks
        splits_gradients, is_whole = self.stage > 1, self.trainer.reduces_whole_gradients
        keeps_shares = (self.stage > 0) & (splits_gradients | (not is_whole))
        in_layers = splits_gradients & (self.is_once ^ True)
        bucket = self.trainer.bucket_elements
        most = bucket + in_layers * (held.num_layer_params - bucket)
        scattered = num_params * (keeps_shares & (in_layers ^ True))
        # A rank sums all gradients over all ranks, or its share over those with the same shard.
        share = num_params + keeps_shares * (ceil_divide(num_params, ranks.shards) - num_params)
        degree = ranks.replicas * (1 + (keeps_shares ^ True) * (ranks.shards - 1))
        stride = ranks.stride * (1 + keeps_shares * (ranks.shards - 1))
        shard_ranks = {"degree": ranks.shards, "stride": ranks.stride}
        shares = larger(1, num_params // larger(1, share))
        return [
            *_cut_buckets("reduce_scatter", scattered, most, shard_ranks),
            *_cut_buckets(
                "all_reduce",
                share,
                ceil_divide(most, shares),
                {"degree": degree, "stride": stride},
            ),
        ]

    def gather_parameters(self, held: HeldParameters) -> StateCall:
        """Return the gathering of updated parameters.

        Where a framework broadcasts them, ranks send theirs one after the other. A broadcast goes
        through a ring as a gather of as many bytes does.
        """
        shards = held.ranks.shards
        num_params = wide_values(held.num_params, held.num_narrow, self.trainer)
        in_layers = (self.stage > 2) & (self.is_once ^ True)  # noqa: PLR2004 - of parameters
        is_gathered = (self.stage > 0) & (in_layers ^ True) & (num_params > 0) & (shards > 1)
        num_owners = smaller(shards, held.num_tensors) if self.trainer.broadcasts_parameters else 1
        num_calls = num_owners * is_gathered
        return StateCall(
            operator="all_gather",
            elements=ceil_divide(num_params, larger(1, num_calls)),
            count=num_calls,
            degree=shards,
            stride=held.ranks.stride,
        )


def wide_values(num_params: Quantity, num_narrow: Quantity, trainer: TrainerProfile) -> Quantity:
    """Return of how many values in 16 bit parameters take the bytes, where some have 8."""
    return num_params - num_narrow // 2 * trainer.keeps_narrow_weights


def _cut_buckets(
    operator: str, elements: Quantity, most: Quantity, ranks: dict[str, Quantity]
) -> list[StateCall]:
    """Return full buckets and the rest; without a size (0) all is one bucket."""
    wanted = elements * (ranks["degree"] > 1)
    whole = larger(1, wanted)
    size = smaller(most + (most == 0) * whole, whole)
    num_full = wanted // size
    rest = wanted - num_full * size
    return [
        StateCall(operator=operator, elements=size, count=num_full, **ranks),
        StateCall(operator=operator, elements=rest, count=1 * (rest > 0), **ranks),
    ]
