"""What stages run and hold, whatever operators cost: kept over all answers of a search."""

from dataclasses import dataclass
from typing import Self

from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.simulator.search.placement.sample import Samples
from foretoken.simulator.search.placement.stage_memory import StageMemories


@dataclass(frozen=True, kw_only=True, slots=True)
class StageBook:
    """Short pipelines that were lowered, and what their stages hold."""

    samples: Samples
    memories: StageMemories

    @classmethod
    def of_scenario(cls, scenario: TrainingScenario) -> Self:
        """Return a book of the stages of a scenario, with nothing in it."""
        samples = Samples(scenario)
        return cls(samples=samples, memories=StageMemories(scenario))
