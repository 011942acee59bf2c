"""Which ranks hold which share of the training states, by the degrees of a layout.

Parameters are of two groups, for other ranks hold the same experts than the same dense parameters.
ZeRO splits their states over the ranks that hold the same (FSDP is its stage 3), or over some of
these, whose shards the rest replicate (HSDP). InternEvo's `isp` splits weights themselves.
Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
2020; Zhao et al., "PyTorch FSDP", 2023, section 3.2.2.
"""

from dataclasses import dataclass
from typing import Self

from foretoken.domain.lowering.communication import RankGroup, expert_width
from foretoken.domain.lowering.expert_layer import larger
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.domain.units import Quantity

ZERO_STAGES = (0, 1, 2, 3)
# From which stage on gradients are split next to what the optimizer keeps, then parameters.
SPLITS_GRADIENTS, SPLITS_PARAMETERS = 2, 3


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StateRanks:
    """Ranks that hold the same parameters: `shards` split their states, `replicas` sets do so.

    The ranks of a set are `stride` apart.
    """

    shards: Quantity
    replicas: Quantity
    stride: Quantity

    @property
    def num_ranks(self) -> Quantity:
        """Every rank with the same parameters."""
        return self.shards * self.replicas

    @property
    def of_shards(self) -> RankGroup:
        """Ranks whose shards make up the whole; of numbers alone, as the next."""
        return RankGroup(axis="dp", degree=self.shards, stride=self.stride)

    @property
    def of_replicas(self) -> RankGroup:
        """Ranks with the same shard."""
        return RankGroup(axis="dp", degree=self.replicas, stride=self.stride * self.shards)

    @property
    def everyone(self) -> RankGroup:
        """Ranks with the same parameters."""
        return RankGroup(axis="dp", degree=self.num_ranks, stride=self.stride)


class Degrees:
    """The degrees of one layout as numbers, or of many as columns, and what follows from them.

    `weight_degree` is 0 except for `isp`, where it is never 0; `shard_degree` is 0 for all ranks
    that hold the same.
    """

    __slots__ = ()

    num_devices: Quantity
    tp: Quantity
    pp: Quantity
    cp: Quantity
    ep: Quantity
    zero_stage: Quantity
    shard_degree: Quantity
    weight_degree: Quantity

    @property
    def base(self) -> TrainingScenario:
        """The scenario, or the one of which cases vary the degrees."""
        raise NotImplementedError

    @property
    def dp(self) -> Quantity:
        """Replicas: what tp, pp and cp leave of the devices."""
        return self.num_devices // (self.tp * self.pp * self.cp)

    @property
    def is_isp(self) -> Quantity:
        """Whether `isp` splits weights."""
        return self.weight_degree > 0

    @property
    def stage_ranks(self) -> Quantity:
        """Ranks of a stage of the pipeline: those of tp, cp and dp."""
        return self.tp * self.cp * self.dp

    @property
    def weight_parts(self) -> Quantity:
        """Over how many ranks `isp` splits weights, 1 for all else."""
        return larger(self.weight_degree, 1)

    @property
    def replicas(self) -> Quantity:
        """Ranks that hold the same dense parameters: their samples or tokens differ."""
        of_data = self.cp * self.dp
        return of_data + self.is_isp * (self.stage_ranks // self.weight_parts - of_data)

    @property
    def state_stage(self) -> Quantity:
        """The ZeRO stage, 0 where a rank alone holds its parameters: nothing is split then."""
        return self.zero_stage * (self.replicas > 1)

    @property
    def shards(self) -> Quantity:
        """Ranks that dense states are split over; 1 without ZeRO."""
        wanted = self.shard_degree + (self.shard_degree == 0) * self.replicas
        return 1 + (self.state_stage > 0) * (wanted - 1)

    @property
    def is_once(self) -> Quantity:
        """Whether ZeRO 3 gathers parameters and reduces gradients once a step.

        FSDP2 in a pipeline does: whole they stay until the last backward pass of a chunk, which
        ends with the reduction. Elsewhere both are per micro batch.
        Source: PyTorch, `distributed/pipelining/stage.py` (backward_maybe_with_nosync); torchtitan,
        `models/llama3/infra/parallelize.py` (reshard_after_forward).
        """
        keeps_masters = self.base.trainer.resolve().trains_master_weights
        return (self.state_stage >= SPLITS_PARAMETERS) & (self.pp > 1) & keeps_masters

    @property
    def expert_width(self) -> Quantity:
        """Ranks that split an expert."""
        return expert_width(self.tp, self.ep, self.base.expert_tp)

    @property
    def dense(self) -> StateRanks:
        """Who holds the states of dense parameters."""
        stride = self.tp + self.is_isp * (self.weight_parts - self.tp)
        return StateRanks(shards=self.shards, replicas=self.replicas // self.shards, stride=stride)

    @property
    def expert(self) -> StateRanks:
        """Who holds the states of experts.

        Fewer ranks hold the same experts than the same dense parameters: a degree beyond them is
        cut.
        """
        stride = self.expert_width * self.ep
        ranks = larger(self.stage_ranks // stride, 1)
        wanted = 1 + (self.state_stage > 0) * (self.shard_degree - 1)
        shards = self._cut(ranks, wanted)
        return StateRanks(shards=shards, replicas=ranks // shards, stride=stride)

    def _cut(self, num_ranks: Quantity, wanted: Quantity) -> Quantity:
        return cut_shards(num_ranks, wanted)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScenarioDegrees(Degrees):
    """The degrees of one scenario, as numbers."""

    scenario: TrainingScenario
    num_devices: int
    tp: int
    pp: int
    cp: int
    ep: int
    zero_stage: int
    shard_degree: int
    weight_degree: int

    @property
    def base(self) -> TrainingScenario:
        """The scenario."""
        return self.scenario

    @classmethod
    def of(cls, scenario: TrainingScenario) -> Self:
        """Return those of a scenario."""
        layout, is_isp = scenario.layout, scenario.weight_parallel == "isp"
        return cls(
            scenario=scenario,
            num_devices=layout.num_devices,
            tp=layout.tp,
            pp=layout.pp,
            cp=layout.cp,
            ep=layout.ep,
            zero_stage=scenario.zero_stage,
            shard_degree=scenario.shard_degree,
            weight_degree=(scenario.weight_degree or layout.tp) if is_isp else 0,
        )


def cut_shards(num_ranks: int, wanted: int) -> int:
    """Return the largest divisor of the ranks that is no more than wanted (0: all of them)."""
    most = min(num_ranks, wanted or num_ranks)
    return max(count for count in range(1, most + 1) if num_ranks % count == 0)
