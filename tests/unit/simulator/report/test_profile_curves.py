"""Measured points put together to curves, and what is drawn of them."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from foretoken.domain.measurements.estimate import (
    LatencyColumns,
    LatencyQuery,
    LatencyReply,
    Provenance,
)
from foretoken.domain.measurements.latency_models import ModelVersion
from foretoken.simulator.measured_curves import FittedCurve, fit_curves, read_curves
from foretoken.simulator.report.profile_curves import (
    profile_sections,
    render_profile,
    write_profile_figure,
)
from foretoken.wire.arrow import rows_to_table

_GIB = 2**30


class _TenPercentSlower:
    """Says 1.1 µs for each MiB of a message or each million FLOP, between 1.0 and 1.3."""

    def __init__(self) -> None:
        self.queries: list[LatencyQuery] = []

    def predict(self, query: LatencyQuery) -> LatencyReply:
        self.queries.append(query)
        tables = []
        for table in query.tables:
            columns = {name: np.asarray(sizes) for name, sizes in table.columns.items()}
            work = columns.get("message_bytes")
            times = work / 2**20 if work is not None else 2e-6 * np.prod(list(columns.values()), 0)
            tables.append(
                LatencyColumns(
                    latency_us=1.1 * times,
                    low_us=1.0 * times,
                    high_us=1.3 * times,
                    provenance=np.full(len(times), Provenance.INTERPOLATED.value),
                )
            )
        return LatencyReply(model_version="fake", tables=tuple(tables))

    def list_models(self) -> tuple[ModelVersion, ...]:
        return ()


def _all_reduce(message_bytes: int, latency_us: float, per_node: int = 8) -> dict[str, object]:
    return _row(
        "all_reduce",
        {"message_bytes": message_bytes, "devices_per_node": per_node, "num_nodes": 1},
        latency_us,
    )


def _gemm(m: int, width: int, latency_us: float) -> dict[str, object]:
    return _row("gemm", {"m": m, "n": width, "k": width}, latency_us)


def _row(operator: str, dims: dict[str, int], latency_us: float) -> dict[str, object]:
    is_collective = operator == "all_reduce"
    return {
        "operator": operator,
        "phase": "forward",
        "dtype": "bf16",
        "dims": dims,
        "device": "a100_sxm_80",
        "topology": "a100_dgx" if is_collective else None,
        "latency_us_median": latency_us,
        "status": "ok",
    }


def _rows() -> pa.Table:
    return rows_to_table(
        [
            _all_reduce(2**20, 1.0),
            _all_reduce(2**30, 1024.0),
            # The middle of three measurements of a point.
            *(_all_reduce(2**25, latency_us) for latency_us in (32.0, 33.0, 29.0)),
            _all_reduce(2**20, 2.0, per_node=2),
            _gemm(256, 1024, 536.870912),
            _gemm(512, 1024, 1073.741824),
        ]
    )


def _fitted() -> list[FittedCurve]:
    return fit_curves(read_curves(_rows()), _TenPercentSlower())


def test_a_curve_is_the_sizes_of_one_group() -> None:
    curves = read_curves(_rows())
    assert [curve.key.title for curve in curves] == [
        "8 x 1 node, bf16",
        "n=1,024 k=1,024, bf16",
        "2 x 1 node, bf16",
    ]
    assert curves[0].sizes.tolist() == [2**20, 2**25, 2**30]
    assert curves[0].latency_us.tolist() == [1.0, 32.0, 1024.0]


def test_rates_are_work_over_time() -> None:
    """A MiB in a µs is 1,049 GB/s; a product of m, n and k has twice as many FLOP."""
    wide, product, _ = read_curves(_rows())
    rates = wide.key.rates(wide.sizes, wide.latency_us)
    assert rates == pytest.approx([2**20 / 1e3] * 3)
    assert wide.key.unit == "GB/s"
    rates = product.key.rates(product.sizes, product.latency_us)
    assert rates == pytest.approx([1.0, 1.0])
    assert product.key.unit == "TFLOP/s"


def test_the_fit_spans_the_points_and_is_held_to_each() -> None:
    predictor = _TenPercentSlower()
    fitted = fit_curves(read_curves(_rows()), predictor)
    # Once for the device with its links, once for it alone.
    assert {query.topology for query in predictor.queries} == {"a100_dgx", ""}
    assert len(predictor.queries) == 2
    wide = fitted[0]
    assert (wide.sizes[0], wide.sizes[-1]) == (2**20, _GIB)
    assert np.all(np.diff(wide.sizes) > 0)
    assert wide.error_ratio == pytest.approx([0.1, 0.1, 0.1])
    assert np.all((wide.low_us < wide.latency_us) & (wide.latency_us < wide.high_us))
    assert wide.provenance == "interpolated"


def test_a_page_has_a_section_for_each_operator() -> None:
    sections = profile_sections(_fitted())
    titles = ["all_reduce on a100_sxm_80, a100_dgx", "gemm on a100_sxm_80"]
    assert [section.title for section in sections] == titles
    table = sections[0].table
    assert table is not None
    assert table.texts()[0] == [
        *("8 x 1 node, bf16", "3", "1,049", "10.0%", "10.0%", "interpolated")
    ]
    page = render_profile("profile", _fitted())
    assert "8 x 1 node, bf16" in page
    (chart,) = [chart for chart in sections[0].pictures if chart.title == "8 x 1 node, bf16"]
    assert {"fitted", "measured"} == set(chart.table.values("label"))
    fitted = [row for row in chart.table.rows if row[0] == "fitted"]
    assert all(low < rate < high for _, _, rate, low, high in fitted)


def test_products_of_several_shapes_are_drawn_over_their_work_too() -> None:
    rows = rows_to_table([_gemm(64, width, 1.0) for width in (256, 512)])
    (section,) = profile_sections(fit_curves(read_curves(rows), _TenPercentSlower()))
    together, *curves = section.pictures
    assert len(curves) == 2
    assert "FLOP of a call" == together.table.column("flop").title


def test_many_curves_are_all_in_the_table_and_some_are_drawn() -> None:
    rows = rows_to_table([_gemm(64, 64 * number, 1.0) for number in range(1, 6)])
    (section,) = profile_sections(fit_curves(read_curves(rows), _TenPercentSlower()), max_panels=2)
    assert section.table is not None
    assert len(section.table.rows) == 5
    _, first, second = section.pictures
    assert "Drawn are the 2 curves with the most points of 5" in first.caption
    assert "" == second.caption


def test_a_picture_of_its_own_is_written(tmp_path: Path) -> None:
    path = tmp_path / "curves.svg"
    write_profile_figure(path, _fitted()[:1])
    assert "8 x 1 node, bf16" in path.read_text(encoding="utf-8")


def test_rows_without_times_are_no_points() -> None:
    failed = {**_gemm(1, 1, 1.0), "latency_us_median": None, "status": "failed"}
    assert read_curves(rows_to_table([failed])) == []
