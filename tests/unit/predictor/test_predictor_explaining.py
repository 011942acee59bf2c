"""Explanations: limits, parts and neighbours of the estimate that `predict` gives."""

from collections.abc import Mapping
from dataclasses import replace
from math import log, prod

import pytest
from predictor_fakes import MakePredictor, Train, all_reduce_rows, base_us, columns_of, gemm_rows

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.measurements.estimate import (
    DType,
    LatencyQuery,
    OperatorTable,
    Provenance,
    pick_estimate,
)
from foretoken.predictor.service import PredictorService

_ASKED = {"m": 100, "n": 4096, "k": 4096}


def _query(operator: str, *calls: Mapping[str, int], device: str = "a30") -> LatencyQuery:
    table = OperatorTable(operator=operator, dtype=DType.FP16, columns=columns_of(*calls))
    return LatencyQuery(device=device, tables=(table,))


@pytest.fixture
def uneven(make_predictor: MakePredictor, train: Train) -> PredictorService:
    """Return a predictor of GEMMs that take longer where tiles of 64 rows are not full."""
    service = make_predictor(gemm_rows(lambda dims: 1.5 if dims["m"] % 64 == 0 else 3.0))
    train(service)
    return service


def test_the_estimate_is_the_one_that_predict_gives(uneven: PredictorService) -> None:
    query = _query("gemm", _ASKED)
    assert pick_estimate(uneven.predict(query)) == uneven.explain(query).estimate


def test_the_limits_are_the_devices(uneven: PredictorService) -> None:
    found = uneven.explain(_query("gemm", _ASKED))
    limit_us = max(found.compute_us, found.memory_us)
    assert pytest.approx(base_us("gemm", _ASKED)) == found.floor_us + limit_us
    assert pytest.approx(limit_us) == found.efficiency_ratio * found.estimate.latency_us


def test_the_members_make_up_what_lies_between_measurements(uneven: PredictorService) -> None:
    """Their answers, weighed in log space, are the estimate."""
    found = uneven.explain(_query("gemm", _ASKED))
    assert pytest.approx(1.0) == sum(member.weight_ratio for member in found.members)
    weights = [member.weight_ratio for member in found.members]
    assert sorted(weights, reverse=True) == weights
    mixed_us = prod(member.latency_us**member.weight_ratio for member in found.members)
    assert pytest.approx(mixed_us) == found.estimate.latency_us


def test_the_contributions_are_the_strongest_first(uneven: PredictorService) -> None:
    """How full the tiles are decides the time, so that must be among the first."""
    found = uneven.explain(_query("gemm", _ASKED))
    strengths = [abs(log(item.factor)) for item in found.contributions]
    assert sorted(strengths, reverse=True) == strengths
    assert any("tile_m_fill" in item.feature for item in found.contributions[:3])


def test_the_neighbours_are_the_nearest_first(uneven: PredictorService) -> None:
    found = uneven.explain(_query("gemm", _ASKED))
    assert {"m": 96, "n": 4096, "k": 4096} == found.neighbours[0].dims
    octaves = [near.distance_octaves for near in found.neighbours]
    assert sorted(octaves) == octaves
    assert 8 == len(octaves)


@pytest.mark.parametrize(
    ("dims", "expected"),
    [
        ({"m": 128, "n": 4096, "k": 4096}, "inside"),
        ({"m": 100, "n": 2048, "k": 2048}, "new configuration"),
        ({"m": 65536, "n": 4096, "k": 4096}, "beyond"),
    ],
    ids=["inside", "new configuration", "beyond"],
)
def test_the_tier_is_told_in_words(
    uneven: PredictorService, dims: Mapping[str, int], expected: str
) -> None:
    assert expected == uneven.explain(_query("gemm", dims)).tier


def test_nothing_measured_leaves_the_limits(make_predictor: MakePredictor) -> None:
    found = make_predictor([]).explain(_query("gemm", _ASKED))
    assert ("unmeasured", (), (), ()) == (
        found.tier,
        found.members,
        found.contributions,
        found.neighbours,
    )
    assert Provenance.ANALYTICAL is found.estimate.provenance


def test_what_other_devices_say_is_a_part_too(make_predictor: MakePredictor, train: Train) -> None:
    """A device with few points of its own, and another of another engine's."""
    lent = gemm_rows(lambda dims: 1.0 + dims["m"] % 3, "a100_sxm_80", framework="sglang")
    own = gemm_rows(lambda dims: 2.0 + dims["m"] % 3, framework="vllm")[::5]
    service = make_predictor([*lent, *own])
    train(service)
    found = service.explain(_query("gemm", _ASKED))
    assert "other devices" in [member.name for member in found.members]
    assert pytest.approx(1.0) == sum(member.weight_ratio for member in found.members)
    mixed_us = prod(member.latency_us**member.weight_ratio for member in found.members)
    assert pytest.approx(mixed_us) == found.estimate.latency_us
    assert found.contributions


def test_a_device_of_the_same_chip_is_explained_by_its_points(
    make_predictor: MakePredictor, train: Train
) -> None:
    service = make_predictor(gemm_rows(device="a100_sxm_80"))
    train(service)
    found = service.explain(_query("gemm", _ASKED, device="a100_sxm_40"))
    assert Provenance.TRANSFERRED is found.estimate.provenance
    assert "the same chip, moved by what its data sheets differ in" in found.estimate.basis
    assert "64 points of gemm on a100_sxm_80" in found.estimate.basis
    assert {"m": 96, "n": 4096, "k": 4096} == found.neighbours[0].dims
    assert ("gap", True) == (found.tier, bool(found.members))


@pytest.mark.parametrize(("num_nodes", "expected"), [(1, "inside"), (2, "unmeasured")])
def test_calls_inside_a_node_are_explained_by_a_topology_of_the_same_nodes(
    make_predictor: MakePredictor, train: Train, num_nodes: int, expected: str
) -> None:
    service = make_predictor(all_reduce_rows())
    train(service)
    dims = {"message_bytes": 2**20, "devices_per_node": 8, "num_nodes": num_nodes}
    query = replace(_query("all_reduce", dims, device="a100_sxm_80"), topology="a100_selene")
    found = service.explain(query)
    assert expected == found.tier
    assert pick_estimate(service.predict(query)) == found.estimate


def test_a_collective_is_explained_by_its_links(
    make_predictor: MakePredictor, train: Train
) -> None:
    service = make_predictor(all_reduce_rows())
    train(service)
    dims = {"message_bytes": 3 * 2**20, "devices_per_node": 8, "num_nodes": 1}
    found = service.explain(_query("all_reduce", dims, device="a100_sxm_80"))
    assert (0.0, True) == (found.compute_us, found.memory_us > 0)
    assert 8 == found.neighbours[0].dims["devices_per_node"]


@pytest.mark.parametrize("calls", [(), (_ASKED, _ASKED)], ids=["none", "two"])
def test_an_explanation_is_of_one_call(
    make_predictor: MakePredictor, calls: tuple[Mapping[str, int], ...]
) -> None:
    query = _query("gemm", *calls) if calls else LatencyQuery(device="a30", tables=())
    with pytest.raises(InvalidRequestError, match=f"of one call, not of {len(calls)}"):
        make_predictor([]).explain(query)
