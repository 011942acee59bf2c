"""The ranks a simulation asks about."""

import dataclasses

from foretoken.domain.layout import ParallelLayout
from foretoken.domain.models.architecture import find_model
from foretoken.domain.scenario import TrainingScenario
from foretoken.domain.trainer import TrainerSpec
from foretoken.simulator.rank import chunk_ranks, stage_ranks

_LLAMA = find_model("llama-2-7b")
_SCENARIO = TrainingScenario(model=_LLAMA, device="h100_sxm", layout=ParallelLayout(pp=4))


def test_a_stage_has_one_rank_on_the_devices_own_topology() -> None:
    ranks = stage_ranks(_LLAMA, ParallelLayout(tp=2, pp=3), "h100_sxm", "")
    assert [(0, 8), (1, 8), (2, 8)] == [(rank.stage, rank.devices_per_node) for rank in ranks]
    (alone,) = stage_ranks(_LLAMA, ParallelLayout(), "h100_sxm", "")
    assert 1 == alone.devices_per_node


def test_chunks_divide_the_layers_and_the_first_take_what_is_over() -> None:
    scenario = dataclasses.replace(_SCENARIO, layout=ParallelLayout(pp=3), virtual_stages=2)
    ranks = chunk_ranks(scenario)
    assert [6, 6, 5, 5, 5, 5] == [rank.num_stage_layers for rank in ranks]
    assert [index == 5 for index in range(6)] == [rank.is_last_stage for rank in ranks]


def test_chunks_are_as_uneven_as_the_scenario_says() -> None:
    ranks = chunk_ranks(dataclasses.replace(_SCENARIO, stage_layers=(7, 9, 9, 7)))
    assert [range(7), range(7, 16), range(16, 25), range(25, 32)] == [
        rank.stage_layers for rank in ranks
    ]


def test_a_framework_pads_the_vocabulary_to_the_ranks_of_tp() -> None:
    """32,000 rows are 31.25 times 128 for each of eight ranks. Source: Megatron-LM, tokenizer."""
    layout, trainer = ParallelLayout(tp=8), TrainerSpec(profile="megatron-core")
    (padded,) = chunk_ranks(dataclasses.replace(_SCENARIO, layout=layout, trainer=trainer))
    (plain,) = chunk_ranks(dataclasses.replace(_SCENARIO, layout=layout))
    assert (32 * 1024, 32000) == (padded.model.vocab, plain.model.vocab)
