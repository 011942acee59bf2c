"""Memory of many strategies at once: kinds of ranks, shards, and one strategy by hand."""

from collections.abc import Sequence

import numpy as np
import pytest
from training_memory_graphs import memory_scenario

from foretoken.domain.frameworks.trainer import TrainerSpec, find_trainer
from foretoken.domain.hardware.device import find_device
from foretoken.domain.lowering.memory import training_headroom_bytes
from foretoken.simulator.search.training.memory import measure_strategies
from foretoken.simulator.steps.held.in_flight import (
    MergedMoments,
    find_moments,
    merge_ranks,
)
from foretoken.simulator.steps.memory import HeldChunks
from foretoken.simulator.steps.parameters import COPIED_HEAD, HEAD
from foretoken.simulator.steps.pipelines.schedule import find_schedule
from foretoken.simulator.steps.strategies import AXES, Strategies, StrategySource

_DEVICES = ("h200_sxm", "a30")


def _strategies(model: str = "llama-3-8b", trainer: str = "plain", **columns: object) -> Strategies:
    """Return strategies on eight devices; columns not given are 1, or 0 where that is nothing."""
    given = {name: np.atleast_1d(np.asarray(column)) for name, column in columns.items()}
    count = max((len(column) for column in given.values()), default=1)
    nothing = {"device", "sequence_parallel", "zero_stage", "shard_degree", "overlap", "recompute"}
    nothing |= {"weight_parallel", "weight_degree", "pipeline_schedule"}
    defaults = {"num_devices": 8, "global_batch_size": 16}
    filled = {name: defaults.get(name, int(name not in nothing)) for name in AXES}
    source = StrategySource(
        scenario=memory_scenario(model, dp=8, trainer=TrainerSpec(profile=trainer)),
        devices=_DEVICES,
        pipeline_schedules=("one_f_one_b", "interleaved"),
    )
    full = {
        name: np.broadcast_to(given.get(name, np.array([value])), count).astype(np.int64)
        for name, value in filled.items()
    }
    return Strategies(source=source, **full)


def test_states_of_a_rank_by_hand() -> None:
    """ZeRO splits first what the optimizer keeps, then gradients, then weights."""
    strategies = _strategies(zero_stage=[0, 1, 2, 3], recompute=2)
    reserved = measure_strategies(strategies).reserved_bytes
    trainer = strategies.source.scenario.trainer.resolve()
    num_params = 8_030_261_248
    saved = (reserved[0] - reserved[1]) / trainer.reserved_ratio
    assert saved == pytest.approx(12 * num_params * 7 / 8, rel=1e-9)
    assert (np.diff(reserved) < 0).all()


def test_margins_are_of_the_strategys_own_device() -> None:
    found = measure_strategies(_strategies(device=[0, 1], zero_stage=0))
    trainer = find_trainer("plain")
    rooms = [
        device.memory_bytes - training_headroom_bytes(device, trainer, [8])
        for device in map(find_device, _DEVICES)
    ]
    assert found.margin_bytes + found.reserved_bytes == pytest.approx(rooms, rel=1e-12)
    assert found.fits.tolist() == [False, False]
    assert measure_strategies(_strategies(pp=8)).fits.tolist() == [True]


def test_alike_strategies_have_alike_memory() -> None:
    """What hides behind what changes no byte."""
    reserved = measure_strategies(_strategies(overlap=[0, 1, 2], tp=2)).reserved_bytes
    assert len(set(reserved.tolist())) == 1


def _cut(schedule: str, pp: int, layers: Sequence[int]) -> tuple[HeldChunks, list[MergedMoments]]:
    """Return chunks of so many layers that are all alike, and the kinds of ranks that hold them."""
    moments = find_moments(find_schedule(schedule), pp, 8 * pp, len(layers) // pp)
    chunks = HeldChunks(
        layers=tuple(layers),
        ranks=np.array([rank.chunks for rank in moments]),
        kinds=(0,) * sum(layers),
        num_kinds=1,
        num_recomputed=0,
    )
    return chunks, merge_ranks(moments, chunks.kinds_of_chunks)


def test_ranks_of_a_kind_are_one_with_the_most_micro_batches() -> None:
    """Of eight ranks the second has most in flight between the first and the last: seven."""
    chunks, ranks = _cut("one_f_one_b", 8, [4] * 8)
    assert [rank.chunks for rank in ranks] == [(0,), (1,), (7,)]
    assert [int(rank.counts[:, 0].max()) for rank in ranks] == [8, 7, 1]
    assert chunks.places[-1] == COPIED_HEAD


def test_chunks_that_need_the_same_count_together() -> None:
    """The middle ranks of an interleaved pipeline hold chunks that are all alike."""
    _, ranks = _cut("interleaved", 4, [2] * 8)
    (middle,) = (rank for rank in ranks if rank.chunks == (1, 5))
    assert middle.of_counts == (1,)
    # Ahead are 2 * (4 - 1 - 1) + 4 passes; one more runs.
    assert int(middle.counts[:, 0].max()) == 2 * 2 + 4 + 1


def test_a_folded_pipeline_has_head_and_embedding_on_one_rank() -> None:
    chunks, _ = _cut("zero_bubble_v", 4, [2] * 8)
    assert chunks.places[-1] == HEAD


def test_states_are_split_over_the_ranks_that_hold_the_same() -> None:
    """Of eight ranks with tp 2 four hold the same; and the same experts, whole over ep 2."""
    strategies = _strategies(
        "qwen3-30b-a3b", tp=2, ep=2, zero_stage=[0, 1, 1], shard_degree=[0, 0, 2]
    )
    assert strategies.dense.shards.tolist() == [1, 4, 2]
    assert strategies.expert.shards.tolist() == [1, 4, 2]
    assert strategies.weight_parts.tolist() == [1, 1, 1]
