"""Which configurations a search asks about."""

from dataclasses import replace
from math import prod

import pytest

from foretoken.domain.layout import ParallelLayout
from foretoken.domain.models.architecture import find_model
from foretoken.domain.scenario import TrainingScenario
from foretoken.simulator.search.space import training_space

_PLAIN = TrainingScenario(model=find_model("llama-2-7b"), device="a100_sxm_80", global_batch_size=4)


def _num_devices(layout: ParallelLayout) -> int:
    return prod(layout.degree(axis) for axis in ("tp", "pp", "dp", "cp"))


def test_every_layout_uses_all_devices_and_divides_the_batch() -> None:
    found = list(training_space(_PLAIN, 8))
    assert {_num_devices(item.layout) for item in found} == {8}
    assert {
        item.global_batch_size % (item.layout.dp * item.micro_batch_size) for item in found
    } == {0}
    assert max(item.layout.dp for item in found) == 4
    assert len({item.name for item in found}) == len(found)


@pytest.mark.parametrize(
    ("recompute", "modes"),
    [("none", {"none", "full"}), ("selective", {"none", "selective", "full"})],
)
def test_recomputation_is_none_full_and_the_scenario_s_own(recompute: str, modes: set[str]) -> None:
    modules = ("mlp",) if recompute == "selective" else ()
    scenario = replace(_PLAIN, recompute=recompute, recompute_modules=modules)
    found = list(training_space(scenario, 2))
    assert {item.recompute for item in found} == modes
    assert {item.recompute for item in found if item.recompute_modules} <= {"selective"}


def test_context_and_expert_parallelism_are_kept_as_far_as_ranks_allow() -> None:
    layout = ParallelLayout(cp=2, ep=8)
    scenario = replace(_PLAIN, model=find_model("mixtral-8x7b"), layout=layout)
    found = {item.layout.pp: item for item in training_space(scenario, 8)}
    assert {item.layout.cp for item in found.values()} == {2}
    assert {pp: item.layout.ep for pp, item in found.items()} == {1: 8, 2: 4, 4: 2}
    assert found[4].name.startswith("tp1 pp4 dp1 cp2 ep2 mbs")


def test_devices_that_context_parallelism_does_not_divide_have_no_layout() -> None:
    assert list(training_space(replace(_PLAIN, layout=ParallelLayout(cp=3)), 8)) == []
