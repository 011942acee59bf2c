"""What stages must hold, as lines over their number of layers."""

from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from foretoken.domain.scenario import TrainingScenario
from foretoken.domain.units import ceil_divide
from foretoken.simulator.search.placement.strategy import StageWork, with_alike_layers
from foretoken.simulator.training.memory_plan import measure_stages

Numbers = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MemoryLines:
    """Bytes that every stage of a pipeline reserves on a device: (stages)."""

    constants: Numbers
    per_layer: Numbers


class StageMemories:
    """Measures pipelines; those that hold the same are measured once."""

    def __init__(self, scenario: TrainingScenario) -> None:
        self._scenario = scenario
        self._measure = cache(self._fit)

    def lines(self, work: StageWork, num_stages: int, num_micro_batches: int) -> MemoryLines:
        """Return what the stages of a pipeline hold.

        Raises:
            InvalidRequestError: stages cannot work so.

        """
        return self._measure(work, num_stages, num_micro_batches)

    def _fit(self, work: StageWork, num_stages: int, num_micro_batches: int) -> MemoryLines:
        even = int(ceil_divide(self._scenario.model.num_layers, num_stages))
        few, many = 1, max(2, even)
        low, high = (
            self._reserved(work, num_stages, num_micro_batches, count) for count in (few, many)
        )
        per_layer = np.maximum(0.0, (high - low) / (many - few))
        return MemoryLines(constants=low - few * per_layer, per_layer=per_layer)

    def _reserved(
        self, work: StageWork, num_stages: int, num_micro_batches: int, num_layers: int
    ) -> Numbers:
        scenario = self._scenario
        layout = replace(scenario.layout, pp=num_stages)
        model = with_alike_layers(scenario.model)
        model = replace(model, num_layers=num_stages * num_layers)
        sample = work.apply(replace(scenario, layout=layout, model=model, stage_layers=()))
        batch = work.dp * work.micro_batch_size * num_micro_batches
        stages = measure_stages(replace(sample, global_batch_size=batch, virtual_stages=1))
        return np.array([stage.reserved_bytes for stage in stages])
