"""The public front: its names, what importing them costs, and results that show themselves."""

import ast
import asyncio
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

import foretoken
from foretoken.client.aio.facade import AsyncForetoken
from foretoken.client.facade import Foretoken
from foretoken.domain.errors import InvalidRequestError, UnknownModelError
from foretoken.domain.measurements.estimate import LatencyColumns

# Fixed: a name that goes breaks users' programs, and belongs into the changelog.
_NAMES = """
    AppConfig AsyncForetoken AutoscalingSpec CallOptions CandidateAxis CapacityReport
    CapacityRequest ChannelOptions CheckRequest ClosureReport ClosureRequest ClosureStep ClusterSpec
    Correction CorrectionRequest DType EngineSpec Explanation FailureRules FailureSpec Foretoken
    ForetokenError GraphReport GraphRequest Job KvTier KvTransferSpec LatencyEstimate LatencyLimit
    LatencyQuery LatencySurface LengthSpec LoraSpec MeasurementBatch ModelArchitecture NodeGroup
    Observation ObservedCall OperatorCall OperatorTable ParallelLayout Phase PlanRequest
    PredictorTrainingReport PriceRules ProfilePlan ProfileReport ProfileRequest Provenance
    QualityReport ReplicaPool RoutingSpec Run RunKind ServingReport ServingScenario
    ServingSearchReport ServingSearchRequest ServingSpace ServingTargets SessionSpec SiteRules Slo
    SloClass SpeculativeSpec SurfaceAxis SurfaceQuery TrainRequest TrainerSpec TrainingMemoryReport
    TrainingReport TrainingRunReport TrainingRunRequest TrainingScenario TrainingSearchReport
    TrainingSearchRequest TrainingSpace WorkloadSpec __version__ connect connect_async load_model
    open open_async read_serving_scenario read_training_scenario
"""
_PUBLIC = _NAMES.split()

_ESTIMATE = foretoken.LatencyEstimate(
    latency_us=41.2,
    low_us=40.0,
    high_us=44.0,
    provenance=foretoken.Provenance.MEASURED,
    nearest={"m": 8},
)


def test_the_public_names_are_these() -> None:
    assert _PUBLIC == foretoken.__all__
    assert _PUBLIC == dir(foretoken)


def test_every_public_name_is_there() -> None:
    assert [] == [name for name in _PUBLIC if getattr(foretoken, name, None) is None]


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'opne'"):
        foretoken.opne  # type: ignore[attr-defined]  # noqa: B018


def test_the_stub_imports_every_public_name_under_its_own() -> None:
    stub = ast.parse(Path(str(foretoken.__file__)).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [
        (alias.name, alias.asname)
        for statement in stub.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    ]
    assert [name for name, _ in imports] == [alias for _, alias in imports]
    assert len(imports) == len(set(imports)) == len(_PUBLIC) - 1


def test_importing_the_front_imports_nothing_of_it() -> None:
    """Every command waits for it."""
    program = (
        "import importlib, sys; before = set(sys.modules); import foretoken;"
        "print(*(set(sys.modules) - before - {'foretoken'}))"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", program], capture_output=True, text=True, check=True
    )
    assert [] == done.stdout.split()


def test_a_scenario_takes_the_name_path_or_text_of_a_model() -> None:
    file = Path(__file__).parents[3] / "docs" / "examples" / "small-llama.json"
    by_path, by_text = (
        foretoken.TrainingScenario(model=model, device="a30")
        for model in (str(file), file.read_text(encoding="utf-8"))
    )
    assert "small-llama" == by_path.model.name
    assert "llama" == by_text.model.name
    assert by_path.model.num_layers == by_text.model.num_layers
    named = foretoken.ServingScenario(model="llama-3.1-8b", device="h200")
    assert foretoken.load_model("llama-3.1-8b") == named.model
    assert named == foretoken.ServingScenario(model=named.model, device="h200_sxm")


def test_a_model_that_is_nowhere_is_refused_with_the_nearest() -> None:
    with pytest.raises(UnknownModelError, match=r"llama-3\.1-8b"):
        foretoken.ServingScenario(model="llama-3.1-8bb", device="a30")


def test_a_text_that_is_no_json_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="JSON"):
        foretoken.ServingScenario(model="{not json", device="a30")


def test_a_result_is_a_line_a_mapping_and_a_table() -> None:
    assert "<LatencyEstimate: 41.2 µs (40 to 44), measured>" == repr(_ESTIMATE)
    assert "measured" == _ESTIMATE.to_dict()["provenance"]
    assert {"m": 8} == json.loads(json.dumps(_ESTIMATE.to_dict()))["nearest"]
    table = _ESTIMATE.to_arrow()
    assert 1 == table.num_rows
    assert [41.2] == table["latency_us"].to_pylist()
    assert [8] == table["nearest.m"].to_pylist()
    assert "<th style='text-align:left'>latency_us</th>" in _ESTIMATE._repr_html_()


def test_a_table_that_is_not_there_is_refused_with_those_that_are() -> None:
    report = foretoken.CapacityReport()
    with pytest.raises(InvalidRequestError, match="'stepps' is not one of summary"):
        report.to_arrow("stepps")


def test_a_surface_is_a_table_with_a_row_for_each_point() -> None:
    axes = (
        foretoken.SurfaceAxis(dim="m", values=(1, 2)),
        foretoken.SurfaceAxis(dim="n", values=(8,)),
    )
    times = (1.0, 2.0)
    surface = foretoken.LatencySurface(
        axes=axes,
        estimates=LatencyColumns(latency_us=times, low_us=times, high_us=times, provenance=(1, 1)),
        model_version="",
    )
    table = surface.to_arrow().to_pydict()
    assert {"m": [1, 2], "n": [8, 8], "latency_us": [1.0, 2.0]} == {
        name: table[name] for name in ("m", "n", "latency_us")
    }


def test_a_page_is_html_and_nothing_else(tmp_path: Path) -> None:
    page = _ESTIMATE.save(tmp_path / "page.html")
    assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    with pytest.raises(InvalidRequestError, match=r"end it in \.html"):
        _ESTIMATE.save(tmp_path / "page.pdf")


def test_a_data_frame_has_the_table_where_pandas_is_installed() -> None:
    pandas = pytest.importorskip("pandas")
    frame = _ESTIMATE.to_pandas()
    assert isinstance(frame, pandas.DataFrame)
    assert [41.2] == list(frame["latency_us"])


def test_without_pandas_a_data_frame_is_refused_with_what_to_install() -> None:
    program = (
        "import sys; sys.modules['pandas'] = None\n"
        "import foretoken\n"
        "try: foretoken.CapacityReport().to_pandas()\n"
        "except foretoken.ForetokenError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert "pip install 'foretoken[pandas]'" in done.stdout


def test_an_address_is_needed_to_connect() -> None:
    with pytest.raises(InvalidRequestError, match="address"):
        foretoken.connect()


def test_every_call_can_be_awaited() -> None:
    """By the same name, with the same arguments."""
    calls = {
        name: method
        for name, method in inspect.getmembers(Foretoken, inspect.isfunction)
        if not name.startswith("_") and name != "close"
    }
    awaited = AsyncForetoken(Foretoken())
    assert {"predict", "simulate_serving", "list_results"} < set(calls)
    assert list(calls) == [name for name in calls if hasattr(AsyncForetoken, name)]
    assert [inspect.getdoc(method) for method in calls.values()] == [
        inspect.getdoc(getattr(awaited, name)) for name in calls
    ]


def test_every_awaited_call_that_takes_progress_knows_its_jobs() -> None:
    """Else leaving it would leave its job running."""
    with_progress = {
        name
        for name, method in inspect.getmembers(Foretoken, inspect.isfunction)
        if "on_progress" in inspect.signature(method).parameters
    }
    with_jobs = {
        name for name, call in vars(AsyncForetoken).items() if getattr(call, "_service", "")
    }
    assert with_progress == with_jobs


def test_an_awaited_error_is_the_same_error() -> None:
    async def predict() -> None:
        async with AsyncForetoken(Foretoken()) as ft:
            await ft.predict("gemm", device="a30", m=1, n=1, k=1)

    with pytest.raises(InvalidRequestError, match="predictor"):
        asyncio.run(predict())
