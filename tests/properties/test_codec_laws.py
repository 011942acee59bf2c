"""Whatever travels arrives as it was sent."""

import dataclasses
from collections.abc import Mapping

import numpy as np
import pytest
from codec_strategies import FLOATS, INT64, MIRRORS, TEXT, values_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from foretoken.api.predictor.v1 import predictor_service_pb2 as predictor_pb2
from foretoken.domain.measurements.estimate import (
    DType,
    LatencyColumns,
    LatencyQuery,
    LatencyReply,
    OperatorTable,
    Phase,
    Provenance,
)
from foretoken.domain.requests.search import CandidateColumns
from foretoken.domain.results.report import REQUEST_OUTCOMES, RequestColumns, SeriesColumns
from foretoken.wire import codec, columns, ipc


@pytest.mark.parametrize("cls", MIRRORS, ids=lambda cls: cls.__name__)
@settings(suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_a_dataclass_survives_the_wire(cls: type, data: st.DataObject) -> None:
    value = data.draw(values_of(cls))
    sent = codec.encode(value, MIRRORS[cls]).SerializeToString()
    assert value == codec.decode(MIRRORS[cls].FromString(sent), cls)


@st.composite
def _tables(draw: st.DrawFn) -> OperatorTable:
    num_rows = draw(st.sampled_from([0, 1, 3, columns.ARROW_ROWS - 1, columns.ARROW_ROWS]))
    seed = draw(st.integers(0, 2**32))
    rng = np.random.default_rng(seed)
    names = draw(st.lists(TEXT, min_size=1, max_size=4, unique=True))
    return OperatorTable(
        operator=draw(TEXT),
        dtype=draw(st.sampled_from(DType)),
        phase=draw(st.sampled_from(Phase)),
        columns={name: rng.integers(-(2**63), 2**63 - 1, num_rows) for name in names},
        variant=draw(TEXT),
        kernel=draw(TEXT),
    )


def _plain(value: object) -> object:
    """Return dataclasses as dictionaries and columns as lists, which compare as a whole."""
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, tuple) and value and dataclasses.is_dataclass(value[0]):
        return [_plain(item) for item in value]
    return list(value) if isinstance(value, np.ndarray | tuple) else value


_QUERIES = st.builds(
    LatencyQuery,
    device=TEXT,
    tables=st.lists(_tables(), max_size=4).map(tuple),
    topology=TEXT,
    framework=TEXT,
    refuse_extrapolation=st.booleans(),
    model_version=TEXT,
    prefer_measured=st.booleans(),
    correction=TEXT,
)


@given(query=_QUERIES)
def test_a_query_survives_the_wire(query: LatencyQuery) -> None:
    sent = columns.encode_query(query).SerializeToString()
    arrived = columns.decode_query(predictor_pb2.PredictRequest.FromString(sent))
    assert _plain(query) == _plain(arrived)


def _answer(query: LatencyQuery) -> LatencyReply:
    """Answer each row with a number that depends on its content alone."""
    tables = []
    for table in query.tables:
        first = np.asarray(next(iter(table.columns.values())), dtype=np.float64)
        provenance = np.where(first < 0, Provenance.MEASURED.value, Provenance.ANALYTICAL.value)
        tables.append(
            LatencyColumns(
                latency_us=first,
                low_us=first / 2,
                high_us=first * 2,
                provenance=provenance,
                nearest={"m": first.astype(np.int64), "n": provenance},
                nearest_us=first / 3,
                nearest_octaves=first / 4,
                basis=table.operator,
                correction_factor=2.0,
            )
        )
    return LatencyReply(model_version="v", tables=tuple(tables))


@given(query=_QUERIES)
def test_a_reply_survives_the_wire(query: LatencyQuery) -> None:
    reply = _answer(query)
    sent = columns.encode_reply(reply, columns.encode_query(query)).SerializeToString()
    arrived = columns.decode_reply(predictor_pb2.PredictResponse.FromString(sent))
    assert _plain(reply) == _plain(arrived)


@given(query=_QUERIES, max_values=st.integers(16, 3_000))
def test_splitting_a_query_changes_no_answer(query: LatencyQuery, max_values: int) -> None:
    """Each part is small enough, and the joined answers are those to the whole query."""
    parts = list(columns.split_query(query, max_values))
    for part in parts:
        sizes = [table.num_rows * (len(table.columns) + 6) for table in part.tables]
        assert sum(sizes) <= max_values
    joined = columns.join_replies(query, [_answer(part) for part in parts])
    assert _plain(_answer(query)) == _plain(joined)


_REQUEST_VALUES = {
    "slo_class": TEXT,
    "outcome": st.sampled_from(REQUEST_OUTCOMES),
    "engine": INT64,
    "prefill_engine": INT64,
}


@given(data=st.data(), num_requests=st.integers(0, 20), chunk_bytes=st.integers(1, 3_000))
def test_single_requests_survive_the_wire(
    data: st.DataObject, num_requests: int, chunk_bytes: int
) -> None:
    def column(name: str) -> list[object]:
        values = _REQUEST_VALUES.get(name, INT64 if name.startswith("num_") else FLOATS)
        return data.draw(st.lists(values, min_size=num_requests, max_size=num_requests))

    requests = RequestColumns(**{name: column(name) for name in _REQUEST_FIELDS})
    chunks = list(ipc.write_chunks(ipc.record_to_table(requests), chunk_bytes))
    assert requests == ipc.table_to_record(ipc.read_chunks(chunks), RequestColumns)
    assert all(len(chunk) <= chunk_bytes for chunk in chunks)


_CANDIDATE_TEXTS = ("name", "device", "mode", "profile", "quantization", "router")
_CANDIDATE_TEXTS += ("verdict", "reason", "speculation", "rules", "kv_tiers")
_CANDIDATE_COUNTS = ("replicas", "tp", "pp", "dp", "ep", "batch_size", "rank")
_CANDIDATE_COUNTS += ("prefill_replicas", "prefill_tp", "prefill_pp", "prefill_ep")
_CANDIDATE_COUNTS += (
    "encoders",
    "prefill_batch_size",
)


@given(data=st.data(), num_points=st.integers(0, 10))
def test_candidates_survive_the_wire(data: st.DataObject, num_points: int) -> None:
    def column(name: str) -> list[object]:
        values: st.SearchStrategy[object] = FLOATS
        if name in _CANDIDATE_TEXTS:
            values = TEXT
        elif name in _CANDIDATE_COUNTS or name.startswith("num_"):
            values = INT64
        elif name.startswith("is_"):
            values = st.booleans()
        return data.draw(st.lists(values, min_size=num_points, max_size=num_points))

    names = CandidateColumns.__dataclass_fields__
    candidates = CandidateColumns(**{name: column(name) for name in names})
    received = ipc.table_to_record(ipc.record_to_table(candidates), CandidateColumns)
    assert candidates == received


@given(values=st.lists(FLOATS, max_size=20))
def test_a_series_survives_the_wire(values: list[float]) -> None:
    names = SeriesColumns.__dataclass_fields__
    whole = range(len(values))
    series = SeriesColumns(
        **{name: tuple(whole) if name.startswith("num_") else tuple(values) for name in names}
    )
    assert series == ipc.table_to_record(ipc.record_to_table(series), SeriesColumns)


_REQUEST_FIELDS = tuple(RequestColumns.__dataclass_fields__)
