"""One strategy of a search, in columns and simulated by itself."""

from training_fakes import RooflinePredictor

from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.domain.requests.training_search import TrainingSearchRequest, TrainingSpace
from foretoken.simulator.search.training.space import resolve_space
from foretoken.simulator.search.training.step_time import StepTimer
from foretoken.simulator.training.step import simulate_training


def time_both_ways(base: TrainingScenario, overlap: str) -> tuple[float, float]:
    """Return the step of data parallelism alone in ms, in columns and by the simulator."""
    space = TrainingSpace(
        **dict.fromkeys(("tp", "pp", "cp", "virtual_stages", "micro_batch_sizes"), (1,)),
        zero_stages=(0,),
        overlaps=(overlap,),
        recompute=("none",),
        weight_parallel=("",),
        sequence_parallel=(False,),
    )
    strategies = resolve_space(TrainingSearchRequest(scenario=base, space=space)).piece(0, 1)
    report = simulate_training(strategies.scenario(0), RooflinePredictor(), None)
    (step_us,) = StepTimer(base, RooflinePredictor()).time(strategies).step_us
    return float(step_us) / 1000, report.step_time_ms
