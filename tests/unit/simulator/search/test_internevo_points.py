"""The points that InternEvo's simulator tries, counted one by one."""

import dataclasses
from collections import Counter

import pytest

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.models.architecture import ModelArchitecture, find_model
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.domain.requests.training_search import WEIGHT_PARALLELS
from foretoken.simulator.search.internevo.question import (
    InternEvoTerms,
    build_request,
    list_degrees,
    list_points,
)
from foretoken.simulator.steps.strategies import Strategies, StrategySource

_MODEL = dataclasses.replace(find_model("internlm2-7b"), num_layers=6)


def _points(world_size: int, num_samples: int, model: ModelArchitecture = _MODEL) -> Strategies:
    request = build_request(
        model, "a100_sxm_80", world_size=world_size, global_batch_size=num_samples * 2048
    )
    source = StrategySource(
        scenario=request.scenario, devices=("a100_sxm_80",), pipeline_schedules=("one_f_one_b",)
    )
    return list_points(source, request.space)


def _brute_force(world_size: int, num_samples: int, model: ModelArchitecture) -> Counter[object]:
    """Count algorithm, pp, sp, wp, zo, micro batch and recomputation by the rules in words."""
    degrees = [1, 2, 4, 6, 8, *range(16, world_size + 1, 8)]
    found: Counter[object] = Counter()
    for pp in (1, 2, 4, 8, 16, 32):
        for sp in degrees:
            cuts_model = model.num_kv_heads % sp == 0 and model.hidden % sp == 0
            if pp > min(world_size, model.num_layers) or world_size % (pp * sp) or not cuts_model:
                continue
            dp = world_size // (pp * sp)
            if num_samples % dp:
                continue
            own = num_samples // dp
            sizes = [size for size in range(1, own + 1) if own % size == 0 and own // size >= pp]
            for size in sizes:
                for recompute in (False, True):
                    for zo in range(1, world_size // pp // sp + 1):
                        found["msp", pp, sp, 0, zo, size, recompute] += 1
                        found["fsp", pp, sp, 0, zo, size, recompute] += 1
                    for wp in (wp for wp in degrees if wp <= world_size // pp):
                        for zo in range(1, world_size // pp // wp + 1):
                            found["isp", pp, sp, wp, zo, size, recompute] += 1
    return found


@pytest.mark.parametrize(("world_size", "num_samples"), [(8, 16), (12, 48), (24, 24), (32, 7)])
def test_every_point_is_tried_once(world_size: int, num_samples: int) -> None:
    points = _points(world_size, num_samples)
    found: Counter[object] = Counter()
    for row in range(len(points)):
        scenario: TrainingScenario = points.scenario(row)
        found[
            scenario.weight_parallel,
            scenario.layout.pp,
            scenario.layout.tp,
            scenario.weight_degree,
            scenario.shard_degree or 1,
            scenario.micro_batch_size,
            scenario.recompute == "full",
        ] += 1
        assert (scenario.zero_stage == 1) == (scenario.shard_degree > 1)
    assert found == _brute_force(world_size, num_samples, _MODEL)


def test_points_run_with_the_rules_of_the_framework() -> None:
    scenario = _points(16, 64).scenario(0)
    plain = build_request(_MODEL, "a100_sxm_80", world_size=16, global_batch_size=2**18).scenario
    assert scenario.trainer.resolve() == plain.trainer.resolve()
    assert scenario.global_batch_size == 64
    assert scenario.layout.num_devices == 16


def test_a_batch_that_no_replica_divides_leaves_none() -> None:
    odd = dataclasses.replace(_MODEL, num_kv_heads=1, num_layers=1)
    assert len(_points(4, 3, odd)) == 0


def test_degrees_are_even_to_eight_then_by_eight() -> None:
    assert list_degrees(1) == [1]
    assert list_degrees(5) == [1, 2, 4]
    assert list_degrees(30) == [1, 2, 4, 6, 8, 16, 24]


def test_a_batch_counts_tokens() -> None:
    with pytest.raises(InvalidRequestError, match="no multiple of the sequence length, 2,048"):
        build_request(_MODEL, "a100_sxm_80", world_size=8, global_batch_size=3000)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ("msp", 1, 4, 1, 1)),
        ({"zero_stage": 1}, ("msp", 1, 4, 1, 8)),
        ({"zero_stage": 1, "shard_degree": 2}, ("msp", 1, 4, 1, 2)),
        ({"weight_parallel": "isp", "weight_degree": 2}, ("isp", 1, 4, 2, 1)),
        ({"weight_parallel": "isp", "weight_degree": 2, "zero_stage": 1}, ("isp", 1, 4, 2, 16)),
    ],
)
def test_a_strategy_is_said_in_its_terms(
    changes: dict[str, object], expected: tuple[object, ...]
) -> None:
    """States over all ranks that hold the same are as many as these ranks."""
    row = {
        **dict.fromkeys(("pp", "cp"), 1),
        "tp": 4,
        "dp": 8,
        "weight_parallel": WEIGHT_PARALLELS[1],
        "weight_degree": 0,
        "zero_stage": 0,
        "shard_degree": 0,
        "micro_batch_size": 2,
        "num_micro_batches": 16,
        "recompute": "full",
        **changes,
    }
    terms = InternEvoTerms.of_row(row)
    assert (terms.algo, terms.pp, terms.sp, terms.wp, terms.zo) == expected
    assert (terms.micro_bsz, terms.micro_num, terms.ckpt) == (2, 16, True)
