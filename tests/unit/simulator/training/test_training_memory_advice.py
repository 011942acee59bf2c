"""Whether a strategy fits, and what is said where it does not."""

from collections.abc import Sequence
from dataclasses import replace

from training_memory_graphs import follow, memory_scenario

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.frameworks.trainer import TrainerSpec
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.domain.results.report import Feasibility
from foretoken.domain.results.training_report import StageMemory
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


def _tried(**changes: object) -> set[str]:
    """Return what is tried of a scenario that does not fit, each alternative by what it changes."""
    scenario, seen = memory_scenario("llama-3.1-8b", **changes), set()

    def note(changed: TrainingScenario) -> Sequence[StageMemory]:
        for name in ("recompute", "sequence_parallel", "zero_stage", "micro_batch_size"):
            if getattr(changed, name) != getattr(scenario, name):
                seen.add(f"{name} {getattr(changed, name)}")
        for axis in ("tp", "pp"):
            if changed.layout.degree(axis) != scenario.layout.degree(axis):
                seen.add(f"{axis} {changed.layout.degree(axis)}")
        return stages

    measured = replace(_measure(memory_scenario())[0], device_bytes=0.0)
    stages = (replace(measured, reserved_bytes=1.0, headroom_bytes=1.0),)
    judge_memory((measured,), scenario, note)
    return seen


def test_everything_that_could_need_less_is_tried() -> None:
    plain = {"recompute full", "recompute selective", "tp 2", "pp 2"}
    assert plain == _tried()
    assert {"recompute full", "tp 2", "pp 2"} == _tried(recompute="selective")
    assert {"tp 2", "pp 2"} == _tried(recompute="full")
    split = {"recompute full", "recompute selective", "tp 4", "pp 2"}
    assert split | {"sequence_parallel True"} == _tried(tp=2)
    assert split == _tried(tp=2, sequence_parallel=True)
    assert plain | {"micro_batch_size 2"} == _tried(micro_batch_size=4)
    assert plain | {"zero_stage 1", "zero_stage 2", "zero_stage 3"} == _tried(dp=2)
    assert plain | {"zero_stage 3"} == _tried(dp=2, zero_stage=2)


def test_what_fills_a_device_to_the_byte_fits() -> None:
    stage = _measure(memory_scenario())[0]
    full = replace(stage, device_bytes=stage.reserved_bytes + stage.headroom_bytes)
    assert (Feasibility(), (full,)) == judge_memory((full,), memory_scenario(), _measure)


def test_the_reason_says_what_is_needed_and_what_there_is_in_gib() -> None:
    scenario = memory_scenario("llama-3.1-8b", dp=8, micro_batch_size=2)
    feasibility, (stage, *_) = judge_memory(_measure(scenario), scenario, _measure)
    needs, has, less = (
        size / 2**30 for size in (stage.reserved_bytes, stage.device_bytes, stage.headroom_bytes)
    )
    said = f"stage 0 needs {needs:.1f} GiB per device, which has {has:.1f} GiB less {less:.1f} for"
    assert feasibility.reason.startswith(said)


def test_chunks_given_one_by_one_are_kept_unless_the_pipeline_changes() -> None:
    scenario = memory_scenario("llama-3.1-8b", pp=2, stage_layers=(20, 12))
    tried = {}

    def keep(changed: TrainingScenario) -> Sequence[StageMemory]:
        tried[changed.layout.tp, changed.layout.pp] = changed.stage_layers
        return _measure(scenario)

    full = tuple(replace(stage, device_bytes=0.0) for stage in _measure(scenario))
    judge_memory(full, scenario, keep)
    assert {(2, 2): (20, 12), (1, 4): ()} == {key: tried[key] for key in ((2, 2), (1, 4))}


def test_an_alternative_that_fills_a_device_to_the_byte_fits() -> None:
    stage = _measure(memory_scenario())[0]
    half = stage.reserved_bytes // 2
    fits = replace(stage, reserved_bytes=half, device_bytes=half + stage.headroom_bytes)
    too_full = replace(stage, device_bytes=0.0)
    _, (advised,) = judge_memory((too_full,), memory_scenario(), lambda _: (fits,))
    assert ", fits)" in advised.advice
    assert "not enough alone" not in advised.advice
