"""Which training states are split over the ranks that hold the same parameters.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
2020.
"""

from dataclasses import dataclass
from typing import Self

from foretoken.domain.placement import expert_mesh
from foretoken.domain.scenario import TrainingScenario

ZERO_STAGES = (0, 1, 2, 3)
_OPTIMIZER, _GRADIENTS, _PARAMETERS = 1, 2, 3


@dataclass(frozen=True, slots=True)
class Sharding:
    """What each rank keeps only its share of; nothing is split over a single rank."""

    optimizer: bool
    gradients: bool
    parameters: bool

    @classmethod
    def of_scenario(cls, scenario: TrainingScenario) -> Self:
        """Return what the scenario's ZeRO stage splits."""
        return cls.of_stage(scenario.zero_stage if num_replicas(scenario) > 1 else 0)

    @classmethod
    def of_stage(cls, stage: int) -> Self:
        """Return what a ZeRO stage splits, over more than one rank."""
        return cls(
            optimizer=stage >= _OPTIMIZER,
            gradients=stage >= _GRADIENTS,
            parameters=stage >= _PARAMETERS,
        )


def exchanges_once(scenario: TrainingScenario) -> bool:
    """Tell whether ZeRO 3 gathers parameters and reduces gradients once a step.

    FSDP2 in a pipeline does: whole they stay until the last backward pass of a chunk, which ends
    with the reduction. Elsewhere both are per micro batch.
    Source: PyTorch, `distributed/pipelining/stage.py` (backward_maybe_with_nosync); torchtitan,
    `models/llama3/infra/parallelize.py` (reshard_after_forward).
    """
    trainer = scenario.trainer.resolve()
    is_sharded = Sharding.of_scenario(scenario).parameters
    return is_sharded and trainer.trains_master_weights and scenario.layout.pp > 1


def num_replicas(scenario: TrainingScenario) -> int:
    """Return the ranks that hold the same dense parameters: their samples or tokens differ."""
    layout = scenario.layout
    if scenario.weight_parallel == "isp":
        return layout.tp * layout.cp * layout.dp // weight_degree(scenario)
    return layout.cp * layout.dp


def weight_degree(scenario: TrainingScenario) -> int:
    """Return over how many ranks `isp` splits weights, 1 for all else."""
    if scenario.weight_parallel != "isp":
        return 1
    return scenario.weight_degree or scenario.layout.tp


def num_shards(scenario: TrainingScenario) -> int:
    """Return the ranks that dense states are split over where they are split."""
    return scenario.shard_degree or num_replicas(scenario)


def num_expert_shards(scenario: TrainingScenario) -> int:
    """Return the ranks that the states of experts are split over where they are split.

    Fewer ranks hold the same experts than the same dense parameters: a degree beyond them is cut.
    """
    num_ranks = expert_mesh(scenario.layout, scenario.expert_tp).dp
    return cut_shards(num_ranks, scenario.shard_degree)


def cut_shards(num_ranks: int, wanted: int) -> int:
    """Return the largest divisor of the ranks that is no more than wanted (0: all of them)."""
    most = min(num_ranks, wanted or num_ranks)
    return max(count for count in range(1, most + 1) if num_ranks % count == 0)
