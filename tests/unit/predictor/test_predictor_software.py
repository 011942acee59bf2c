"""The engine's own software answers first; what stands in for it is wider, and named."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from predictor_fakes import MakePredictor, Rows, Train, base_us, columns_of, gemm_rows, row_of

from foretoken.domain.errors import UnknownMeasurementError
from foretoken.domain.measurements.estimate import (
    DType,
    LatencyColumns,
    LatencyQuery,
    OperatorTable,
    Provenance,
)
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.predictor.service import PredictorService
from foretoken.predictor.software import (
    Relation,
    library_doubt_log,
    parse_software,
    software_doubt_log,
)

_MEASURED = {"m": 512, "n": 4096, "k": 4096}
_PRO = {"device": "rtx_pro_6000", "topology": "rtx_pro_6000_pcie"}


@pytest.mark.parametrize(
    ("asked", "have", "operator", "expected"),
    [
        ("vllm 0.19", "vllm 0.19.0", "gemm", (Relation.SAME, ())),
        ("vllm 0.14-0.16", "vllm 0.16.2", "gemm", (Relation.SAME, ())),
        ("vllm 0.14-0.16", "vllm 0.19.0", "gemm", (Relation.VERSION, (0, 3, 0))),
        ("vllm 0.14-0.16", "vllm 0.11.1", "gemm", (Relation.VERSION, (0, 3, 1))),
        ("trtllm 0.20-1.3", "trtllm 1.3.0rc20", "gemm", (Relation.SAME, ())),
        ("vllm 0.19", "vllm", "gemm", (Relation.SAME, ())),
        ("vllm 0.19", "", "gemm", (Relation.SAME, ())),
        ("vllm 0.19", "sglang 0.5.14", "gemm", (Relation.OTHER, ())),
        ("vllm 0.19", "nccl 2.29.2", "all_reduce", (Relation.OTHER, ())),
        ("vllm 0.19", "nccl 2.29.2", "all_gather", (Relation.LIBRARY, ())),
        ("pytorch", "nccl 2.29.2", "all_reduce", (Relation.LIBRARY, ())),
        ("pytorch", "torch 2.5.1+cu124", "gemm", (Relation.SAME, ())),
        ("sglang 0.5.9", "sglang dev-1aa0e9", "gemm", (Relation.VERSION, (sys.maxsize,))),
        ("sglang", "sglang dev-1aa0e9", "gemm", (Relation.SAME, ())),
    ],
)
def test_measured_software_is_told_from_the_one_in_mind(
    asked: str, have: str, operator: str, expected: tuple[Relation, tuple[int, ...]]
) -> None:
    assert expected == parse_software(asked).relate(have, operator)


@pytest.mark.parametrize(
    ("have", "dtype", "variant", "expected"),
    [
        ("sglang 0.5.14", "bf16", "", Relation.LIBRARY),
        ("sglang 0.5.14", "fp16", "", Relation.LIBRARY),
        # Its own kernels in 8 bit, and of weights of few bits.
        ("sglang 0.5.14", "fp8", "", Relation.OTHER),
        ("sglang 0.5.14", "bf16", "quant=int4_wo", Relation.OTHER),
        ("vllm 0.24.0", "bf16", "", Relation.OTHER),
        ("trtllm 1.3.0", "bf16", "", Relation.OTHER),
    ],
)
def test_products_in_16_bit_that_are_measured_as_pytorchs_count_as_its(
    have: str, dtype: str, variant: str, expected: Relation
) -> None:
    assert expected == parse_software("pytorch").relate(have, "gemm", dtype, variant)[0]


def test_products_measured_as_pytorchs_answer_before_more_rows_of_others(
    make_predictor: MakePredictor, train: Train
) -> None:
    """They are of some version of it."""
    service = make_predictor([*_gemms(1.5, "sglang", "0.5.14", 24), *_gemms(2.0, "vllm", "0.24.0")])
    train(service)
    found = _ask(service, preferred_framework="pytorch")
    assert [1.5] == _slowdowns(found)
    assert "" == found.other_framework
    (doubt_log,) = library_doubt_log(np.asarray(found.latency_us))
    _assert_wider(found, _ask(service, framework="sglang 0.5.14"), doubt_log)


def test_long_products_of_a_library_vary_less_between_its_versions_than_short_ones() -> None:
    short, long = np.exp(library_doubt_log(np.array([99.0, 100.0])))
    assert (1.27, 1.15) == pytest.approx((short, long))


def test_own_rows_answer_before_more_rows_of_others(
    make_predictor: MakePredictor, train: Train
) -> None:
    service = make_predictor([*_gemms(2.0, "vllm", "0.19.0", 24), *_gemms(1.5, "sglang", "0.5.14")])
    train(service)
    assert [2.0] == _slowdowns(_ask(service))
    own = _ask(service, preferred_framework="vllm 0.19")
    assert [2.0] == _slowdowns(own)
    assert [Provenance.MEASURED.value] == own.provenance.tolist()
    assert "" == own.other_framework
    assert "vllm 0.19.0" in own.basis


def test_where_no_software_is_said_one_answers_and_is_kept_to(
    make_predictor: MakePredictor, train: Train
) -> None:
    """VLLM's newest version, though there are more rows of others; without vLLM all together."""
    others = [*_gemms(1.5, "sglang", "0.5.14"), *_gemms(1.7, "trtllm", "1.3.0")]
    few = [*_gemms(2.0, "vllm", "0.19.0", 24), *_gemms(3.0, "vllm", "0.24.0", 24)]
    service = make_predictor([*few, *others])
    train(service)
    assert [3.0] == _slowdowns(_ask(service))
    without = make_predictor(others)
    train(without)
    (together,) = _slowdowns(_ask(without))
    assert 1.5 <= together <= 1.7


def _assert_wider(found: LatencyColumns, plain: LatencyColumns, doubt_log: float) -> None:
    """Hold an interval to the plain one and a further cause of errors, whose squares add up."""
    for end, known in ((found.high_us, plain.high_us), (found.low_us, plain.low_us)):
        known_log = np.log(known[0] / plain.latency_us[0])
        end_log = abs(np.log(end[0] / found.latency_us[0]))
        assert end_log == pytest.approx(np.sqrt(known_log**2 + doubt_log**2))


def test_the_nearest_version_answers_before_other_software(
    make_predictor: MakePredictor, train: Train
) -> None:
    service = make_predictor(
        [
            *_gemms(2.0, "vllm", "0.11.0"),
            *_gemms(3.0, "vllm", "0.20.1", 24),
            *_gemms(1.5, "sglang", "0.5.14"),
        ]
    )
    train(service)
    found = _ask(service, preferred_framework="vllm 0.19")
    assert [3.0] == _slowdowns(found)
    assert "vllm 0.20.1" == found.other_framework
    assert [Provenance.INTERPOLATED.value] == found.provenance.tolist()
    own = _ask(service, framework="vllm 0.20.1")
    doubt_log = software_doubt_log(Relation.VERSION, find_operator("gemm"), "bf16", "")
    _assert_wider(found, own, doubt_log)


def test_other_software_widens_the_interval_and_is_named(
    make_predictor: MakePredictor, train: Train
) -> None:
    service = make_predictor([*_gemms(2.0, "sglang", "0.5.14"), *_gemms(2.2, "trtllm", "1.3.0")])
    train(service)
    anybody = _ask(service)
    found = _ask(service, preferred_framework="vllm 0.19")
    assert anybody.latency_us.tolist() == found.latency_us.tolist()
    assert "sglang 0.5.14, trtllm 1.3.0" == found.other_framework
    doubt_log = software_doubt_log(Relation.OTHER, find_operator("gemm"), "bf16", "")
    _assert_wider(found, anybody, doubt_log)
    assert "" == anybody.other_framework


def test_other_software_answers_where_it_is_surer_than_its_own_from_afar(
    make_predictor: MakePredictor, train: Train
) -> None:
    """Its own rows are a handful of the smallest calls, another's are everywhere."""
    own = _gemms(4.0, "vllm", "0.19.0")[:12]
    service = make_predictor([*own, *_gemms(2.0, "sglang", "0.5.14")])
    train(service)
    near = _ask(service, own[3]["dims"], preferred_framework="vllm 0.19")
    assert [4.0] == _slowdowns(near, dims=own[3]["dims"])
    far = _ask(service, preferred_framework="vllm 0.19")
    assert [2.0] == _slowdowns(far)
    assert "sglang 0.5.14" == far.other_framework
    assert far.high_us[0] < _ask(service, framework="vllm 0.19").high_us[0]


def test_the_engines_own_sums_are_not_nccls(make_predictor: MakePredictor, train: Train) -> None:
    service = make_predictor([*_sums(4.0, "vllm", "0.19.0", 2), *_sums(2.0, "nccl", "2.29.2", 2)])
    train(service)
    dims = {"message_bytes": 2**24, "devices_per_node": 2, "num_nodes": 1}
    query = {**_PRO, "operator": "all_reduce"}
    for software, expected in {"vllm 0.19": 4.0, "sglang 0.5": 2.0, "pytorch": 2.0}.items():
        found = _ask(service, dims, preferred_framework=software, **query)
        assert [expected] == _slowdowns(found, "all_reduce", dims)
        assert ("nccl" in found.other_framework) == (software == "sglang 0.5")


@pytest.mark.parametrize(
    ("asked", "known"),
    [
        ({"framework": "vllm 0.18"}, "vllm 0.19.0"),
        ({"framework": "tensorrt_llm"}, "vllm 0.19.0"),
        ({"framework": "nccl 2"}, "vllm 0.19.0"),
        ({"kernel": "cutlas"}, "cutlass"),
        ({"variant": "colour=blue"}, "quant=fp8_block"),
        ({"variant": "lane=nosuch"}, "quant=fp8_block"),
        ({"variant": "cache=cold"}, "quant=fp8_block"),
        ({"variant": "exchange=nosuch"}, "quant=fp8_block"),
    ],
)
def test_what_nobody_measured_is_refused_with_what_there_is(
    asked: dict[str, str], known: str, with_kernels: PredictorService
) -> None:
    with pytest.raises(UnknownMeasurementError) as caught:
        _ask(with_kernels, **asked)
    [value] = asked.values()
    assert f"{value!r}" in caught.value.message
    assert known in caught.value.message


@pytest.mark.parametrize(
    "asked",
    [
        {"framework": "vllm"},
        {"framework": "vllm 0.19"},
        {"framework": "nccl", "operator": "all_reduce", **_PRO},
        {"kernel": "cutlass"},
        {"kernel": "cutlas", "tentative": True},
        {"variant": "colour=blue", "tentative": True},
        {"variant": "quant=int4_wo"},
        {"variant": "attn=bf16;quant=int4_wo"},
        {"variant": "cache=warm"},
        {"variant": "exchange=deepep_low_latency;part=dispatch"},
        {"preferred_framework": "orca 1.0"},
    ],
)
def test_what_was_measured_or_can_be_is_answered(
    asked: dict[str, Any], with_kernels: PredictorService
) -> None:
    is_sum = asked.get("operator") == "all_reduce"
    dims = {"message_bytes": 2**20, "devices_per_node": 2, "num_nodes": 1} if is_sum else _MEASURED
    assert _ask(with_kernels, dims, **asked).latency_us[0] > 0


def test_the_only_kernel_of_a_series_is_no_other_code(with_kernels: PredictorService) -> None:
    plain, named = _ask(with_kernels), _ask(with_kernels, kernel="cutlass")
    assert plain.high_us.tolist() == named.high_us.tolist()
    assert [Provenance.MEASURED.value] == named.provenance.tolist()


def test_without_any_measurement_all_software_is_answered(make_predictor: MakePredictor) -> None:
    found = _ask(make_predictor([]), framework="vllm", kernel="any")
    assert [Provenance.ANALYTICAL.value] == found.provenance.tolist()


@pytest.fixture(scope="module")
def with_kernels(make_shared_predictor: MakePredictor, train: Train) -> PredictorService:
    """One that knows kernels, variants and sums of a library; tests only ask it."""
    gemms = _gemms(2.0, "vllm", "0.19.0", kernel="cutlass")
    variants = _gemms(1.2, "vllm", "0.19.0", variant="quant=fp8_block")
    service = make_shared_predictor([*gemms, *variants, *_sums(2.0, "nccl", "2.29.2", 2)])
    train(service)
    return service


def _gemms(slowdown: float, framework: str, version: str, num_rows: int = 64, **other: str) -> Rows:
    rows = gemm_rows(lambda _: slowdown, framework=framework, framework_version=version, **other)
    return rows[-num_rows:]


def _sums(slowdown: float, framework: str, version: str, *groups: int) -> Rows:
    rows = []
    for devices_per_node in groups:
        for exponent in range(10, 29):
            dims = {
                "message_bytes": 2**exponent,
                "devices_per_node": devices_per_node,
                "num_nodes": 1,
            }
            latency_us = slowdown * base_us("all_reduce", dims, **_PRO)
            software = {"framework": framework, "framework_version": version}
            rows.append(row_of("all_reduce", dims, latency_us, **_PRO, **software))
    return rows


def _ask(
    service: PredictorService,
    dims: dict[str, int] = _MEASURED,
    operator: str = "gemm",
    **asked: Any,
) -> LatencyColumns:
    names = ("variant", "kernel", "tentative")
    of_table = {name: value for name, value in asked.items() if name in names}
    of_query = {name: value for name, value in asked.items() if name not in names}
    columns = columns_of(dims)
    table = OperatorTable(operator=operator, dtype=DType.FP16, columns=columns, **of_table)
    query = {"device": "a30", "prefer_measured": True, **of_query}
    return service.predict(LatencyQuery(tables=(table,), **query)).tables[0]


def _slowdowns(
    found: LatencyColumns, operator: str = "gemm", dims: dict[str, int] = _MEASURED
) -> list[float]:
    place = ("a30", "") if operator == "gemm" else (_PRO["device"], _PRO["topology"])
    return [round(float(us) / base_us(operator, dims, *place), 3) for us in found.latency_us]


def test_other_software_that_knows_such_calls_answers_before_its_own_that_does_not(
    make_predictor: MakePredictor, train: Train
) -> None:
    """Its own layers all have an indexer, which the layer in question has not."""
    operator = "dsa_decode_module"
    calls = [dims for dims in find_operator(operator).sweep(False) if dims["num_heads"] == 16]
    indexed = [dims for dims in calls if dims["index_num_heads"]]
    own = _blocks(indexed, 2.0, "vllm", "0.19.0")
    service = make_predictor([*own, *_blocks(calls, 3.0, "sglang", "0.5.14")])
    train(service)
    for dims, expected in ((calls[-1], 3.0), (indexed[-1], 2.0)):
        found = _ask(service, dims, operator, preferred_framework="vllm 0.19")
        assert expected == pytest.approx(found.latency_us[0] / base_us(operator, dims), rel=1e-3)
        assert ("sglang" in found.other_framework) == (not dims["index_num_heads"])


def _blocks(
    calls: Sequence[Mapping[str, int]], slowdown: float, framework: str, version: str
) -> Rows:
    software = {"framework": framework, "framework_version": version}
    operator = "dsa_decode_module"
    return [row_of(operator, d, slowdown * base_us(operator, d), **software) for d in calls]
