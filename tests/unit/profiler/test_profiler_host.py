"""What the host takes, timed on the CPU and recorded as rows."""

import threading

import pytest
from profiler_fakes import FakeCatalog

from foretoken.domain.operators.spec.operator import find_operator
from foretoken.jobs.runner import JobProgress
from foretoken.profiler.host.measuring import HostReport, measure_host
from foretoken.profiler.host.probe import HostProbe, sample_probe
from foretoken.profiler.local_device import LocalDevice

pytest.importorskip("transformers")

_CPU = LocalDevice(name="cpu", torch_name="cpu")


@pytest.fixture(scope="module")
def measured() -> tuple[HostReport, FakeCatalog]:
    catalog = FakeCatalog()
    progress = JobProgress(lambda *_: None, threading.Event())
    report = measure_host(_CPU, catalog, progress, quick=True, num_threads=1)
    return report, catalog


@pytest.mark.slow
def test_rows_are_of_every_part_and_their_dimensions_are_the_operators(
    measured: tuple[HostReport, FakeCatalog],
) -> None:
    """A CPU has no graphs; tokens become text where the package for it is installed."""
    _, catalog = measured
    rows = catalog.table.to_pylist()
    parts = {(row["operator"], row["variant"].removeprefix("part=")) for row in rows}
    expected = {
        ("launch_gap", part)
        for part in (
            "launch_eager",
            "model_eager",
            "operators_eager",
            "model_training",
            "operators_training",
        )
    }
    assert expected <= parts
    assert {("host_step", "sample"), ("host_step", "fetch_tokens")} <= parts
    assert {"launch_gap", "host_step"} == {operator for operator, _ in parts}
    for row in rows:
        find_operator(row["operator"]).check_dims(dict(row["dims"]))
        assert row["latency_us_median"] > 0


@pytest.mark.slow
def test_a_run_is_complete_and_its_report_counts_its_rows(
    measured: tuple[HostReport, FakeCatalog],
) -> None:
    """Each part has a figure, and what was not measured is said."""
    report, catalog = measured
    assert {report.run_id} == set(catalog.runs) == catalog.completed
    assert catalog.table.num_rows == report.num_rows
    variants = set(catalog.table.column("variant").to_pylist())
    assert {f"part={item.part}" for item in report.parts} == variants
    assert any("scheduler of vLLM was not measured" in note for note in report.notes)


def test_parts_of_a_probe_are_sampled_together() -> None:
    """As often each, so that what disturbs one disturbs the other."""
    taken = iter(range(10_000))

    def sample() -> dict[str, float]:
        value = 100.0 + next(taken) % 2
        return {"a": value, "b": 2 * value}

    probe = HostProbe(operator="launch_gap", dims={"num_kernels": 1}, kernel="k", sample=sample)
    found = sample_probe(probe, longest_s=0.2)
    assert found["a"].num_samples == found["b"].num_samples >= 5
    assert 2 * found["a"].latency_us_median == found["b"].latency_us_median
