"""Whether a strategy fits, and what is said where it does not."""

from collections.abc import Sequence

from training_memory_graphs import follow, memory_scenario

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.report import Feasibility
from foretoken.domain.scenario import TrainingScenario
from foretoken.domain.trainer import TrainerSpec
from foretoken.domain.training_report import StageMemory
from foretoken.simulator.training.memory.advice import judge_memory


def _measure(scenario: TrainingScenario) -> Sequence[StageMemory]:
    return follow(scenario)[0]


def test_what_fits_has_no_advice_and_tries_nothing() -> None:
    stages = _measure(memory_scenario())

    def refuse(_: TrainingScenario) -> Sequence[StageMemory]:
        raise AssertionError

    assert judge_memory(stages, memory_scenario(), refuse) == (Feasibility(), stages)


def test_what_does_not_fit_says_why_and_what_helps_most() -> None:
    scenario = memory_scenario("llama-3.1-8b", dp=8, micro_batch_size=2)
    feasibility, stages = judge_memory(_measure(scenario), scenario, _measure)
    assert not feasibility.is_feasible
    assert "most of it is optimizer" in feasibility.reason
    assert "zero_stage 3 (" in feasibility.reason
    assert "fits" in stages[0].advice
    assert stages[0].margin_bytes < 0


def test_the_savings_named_are_those_of_the_alternative() -> None:
    scenario = memory_scenario("llama-3.1-8b", dp=8)
    before = _measure(scenario)
    _, stages = judge_memory(before, scenario, _measure)
    sharded = _measure(memory_scenario("llama-3.1-8b", dp=8, zero_stage=3))
    saving = (before[0].reserved_bytes - sharded[0].reserved_bytes) / 2**30
    assert f"zero_stage 3 (-{saving:.1f} GiB" in stages[0].advice


def test_alternatives_that_are_refused_are_left_out() -> None:
    scenario = memory_scenario("llama-3.1-8b", dp=8)

    def refuse(_: TrainingScenario) -> Sequence[StageMemory]:
        raise InvalidRequestError.of_field("layout", "does not fit the model")

    _, stages = judge_memory(_measure(scenario), scenario, refuse)
    assert stages[0].advice == "no single change of recomputation, sharding or layout needs less"


def test_only_stages_that_do_not_fit_are_advised() -> None:
    scenario = memory_scenario("llama-3.1-8b", pp=2, global_batch_size=64, sequence_length=8192)
    _, stages = judge_memory(_measure(scenario), scenario, _measure)
    assert [bool(stage.advice) for stage in stages] == [stage.margin_bytes < 0 for stage in stages]


def test_nothing_is_advised_that_the_framework_lacks() -> None:
    """Megatron-LM of 2021 has no ZeRO; without bounds its rules would be helped by it."""
    for rules, is_advised in (({}, False), ({"can": "{}"}, True)):
        trainer = TrainerSpec(profile="megatron-lm-2021", rules=rules)
        scenario = memory_scenario("llama-3.1-8b", dp=8, micro_batch_size=2, trainer=trainer)
        feasibility, _ = judge_memory(_measure(scenario), scenario, _measure)
        assert is_advised == ("zero_stage" in feasibility.reason)
