"""Which training states are split over the data-parallel ranks.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
2020.
"""

from dataclasses import dataclass
from typing import Self

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
        """Return what the scenario's `zero_stage` splits: each stage adds to the one before."""
        stage = scenario.zero_stage if scenario.layout.dp > 1 else 0
        return cls(
            optimizer=stage >= _OPTIMIZER,
            gradients=stage >= _GRADIENTS,
            parameters=stage >= _PARAMETERS,
        )
