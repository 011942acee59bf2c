"""The ranks a simulation queries."""

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from foretoken.domain.frameworks.trainer import TrainerSpec
from foretoken.domain.models.architecture import find_model
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.simulator.rank import chunk_ranks, count_parts, even_layers, stage_ranks

_LLAMA = find_model("llama-2-7b")
_SCENARIO = TrainingScenario(model=_LLAMA, device="h100_sxm", layout=ParallelLayout(pp=4))


def test_a_stage_has_one_rank_on_the_devices_own_topology() -> None:
    ranks = stage_ranks(_LLAMA, ParallelLayout(tp=2, pp=3), "h100_sxm", "")
    assert [(0, 8), (1, 8), (2, 8)] == [(rank.stage, rank.devices_per_node) for rank in ranks]
    (alone,) = stage_ranks(_LLAMA, ParallelLayout(), "h100_sxm", "")
    assert 1 == alone.devices_per_node


def test_chunks_divide_the_layers_and_the_first_take_what_is_over() -> None:
    scenario = dataclasses.replace(_SCENARIO, layout=ParallelLayout(pp=7))
    ranks = chunk_ranks(scenario)
    assert [5, 5, 5, 5, 4, 4, 4] == [rank.num_stage_layers for rank in ranks]
    assert [index == 6 for index in range(7)] == [rank.is_last_stage for rank in ranks]


def test_the_embedding_and_the_head_count_as_layers_where_that_makes_chunks_alike() -> None:
    """Llama 3.1 405B has 126 layers: the first and the last of 16 stages have one less.

    Source: "The Llama 3 Herd of Models", section 3.3.2. Of 127 the head alone counts.
    """
    assert (7, *[8] * 14, 7) == even_layers(126, 16)
    assert (1, *[2] * 62, 1) == even_layers(126, 64)
    assert (0, *[1] * 126, 0) == even_layers(126, 128)
    assert (*[2] * 63, 1) == even_layers(127, 64)


@given(num_layers=st.integers(1, 200), num_chunks=st.integers(1, 200))
def test_chunks_have_all_layers_and_differ_by_one_at_most(num_layers: int, num_chunks: int) -> None:
    """Alike if they can be; if the two ends can mend it, all between them are; in order if not."""
    layers = even_layers(num_layers, num_chunks)
    assert (num_chunks, num_layers) == (len(layers), sum(layers))
    assert max(layers) - min(layers) <= 1
    if num_layers % num_chunks == 0:
        assert {num_layers // num_chunks} == set(layers)
    elif (num_layers + 1) % num_chunks == 0 or (num_layers + 2) % num_chunks == 0:
        assert set(layers[1:-1]) <= {max(layers)}  # none of two
        assert layers[-1] == max(layers) - 1
    else:
        assert sorted(layers, reverse=True) == list(layers)
    has_parts = min(layers[1:-1], default=1) > 0
    assert has_parts == (num_chunks <= count_parts(num_layers))


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
