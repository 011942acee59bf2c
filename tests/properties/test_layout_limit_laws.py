"""Limits of layouts say of columns of cases what they say of each case alone."""

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from foretoken.domain.models.architecture import find_model
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.limit import list_broken
from foretoken.domain.requests.scenario import CONTEXT_PARALLELS, TrainingScenario
from foretoken.simulator.steps.legality import layout_limits, order_limits, shard_limits
from foretoken.simulator.steps.sharding import ScenarioDegrees
from foretoken.simulator.steps.strategies import Strategies, join_strategies

_MODELS = tuple(find_model(name) for name in ("llama-3-8b", "mixtral-8x7b", "deepseek-v3"))
_SCHEDULES = ("one_f_one_b", "interleaved", "dualpipe")
_degrees = st.sampled_from((1, 2, 3, 4, 8))


@st.composite
def _scenarios(draw: st.DrawFn) -> list[TrainingScenario]:
    """Return scenarios that differ in what cases of one space may."""
    base = TrainingScenario(
        model=draw(st.sampled_from(_MODELS)),
        device="h100_sxm",
        topology="h100_dgx",
        sequence_length=draw(st.sampled_from((96, 4096))),
        context_parallel=draw(st.sampled_from(CONTEXT_PARALLELS)),
        pipeline_schedule=draw(st.sampled_from(_SCHEDULES)),
        expert_tp=draw(st.sampled_from((0, 2))),
    )
    found = []
    for _ in range(6):
        layout = ParallelLayout(**{axis: draw(_degrees) for axis in ("tp", "pp", "dp", "cp", "ep")})
        form = draw(st.sampled_from(("", "", "msp", "isp")))
        case = replace(
            base,
            layout=layout,
            global_batch_size=layout.dp * draw(st.sampled_from((4, 6, 16))),
            virtual_stages=draw(st.sampled_from((1, 2))),
            sequence_parallel=draw(st.booleans()),
            zero_stage=draw(st.integers(0, 3)),
            shard_degree=draw(st.sampled_from((0, 2, 3))),
            weight_parallel=form,
            weight_degree=draw(st.sampled_from((0, 2, 3))) if form == "isp" else 0,
        )
        found.append(case)
    return found


def _join(scenarios: list[TrainingScenario]) -> Strategies:
    cases = [Strategies.of_scenario(scenario) for scenario in scenarios]
    return join_strategies([replace(case, source=cases[0].source) for case in cases])


@given(scenarios=_scenarios())
def test_columns_break_the_limits_that_each_case_breaks_alone(
    scenarios: list[TrainingScenario],
) -> None:
    for limits in (layout_limits, shard_limits, order_limits):
        together = [np.broadcast_to(item.is_broken, 6) for item in limits(_join(scenarios))]
        for row, scenario in enumerate(scenarios):
            alone = list(limits(Strategies.of_scenario(scenario)))
            assert [bool(np.all(item.is_broken)) for item in alone] == [
                bool(flags[row]) for flags in together
            ]
            assert all(violation.description for violation in list_broken(alone))


@given(scenarios=_scenarios())
def test_columns_hold_the_shares_that_each_case_holds_alone(
    scenarios: list[TrainingScenario],
) -> None:
    together = _join(scenarios)
    for row, scenario in enumerate(scenarios):
        alone = ScenarioDegrees.of(scenario)
        for name in ("dense", "expert"):
            ranks, columns = getattr(alone, name), getattr(together, name)
            for part in ("shards", "replicas", "stride"):
                assert getattr(columns, part)[row] == getattr(ranks, part)
        for name in ("dp", "replicas", "state_stage", "is_once", "weight_parts"):
            assert getattr(together, name)[row] == getattr(alone, name)
