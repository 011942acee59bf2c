"""The starter that comes with the program: what it holds, and how a home without rows uses it."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from artifact_shelf import ArtifactShelf
from pyarrow import parquet
from typer.testing import CliRunner, Result

from foretoken.app.cli.main import app
from foretoken.app.config import AppConfig, EndpointsConfig
from foretoken.app.demo_questions import DEPLOYMENT
from foretoken.app.installed_runs import STARTER_RUNS, list_installed_runs
from foretoken.app.starter import describe_starter, tell_once, with_starter
from foretoken.domain.frameworks.engine import DEFAULT_PROFILE, find_engine
from foretoken.predictor.config import PredictorConfig
from foretoken.predictor.model_store import read_models
from foretoken.predictor.regression.curves import has_curves
from foretoken.predictor.software import Relation, parse_software
from foretoken.predictor.starter import PRIOR_NAME, TUNING_NAME, StarterSeries
from foretoken.predictor.trainer import tune
from foretoken.predictor.tuning import read_tunings
from foretoken.simulator.validation.published_run import AskedRun, find_nearest

_DATA = Path(__file__).resolve().parents[3] / "starter" / "src" / "foretoken_starter" / "data"
_GPUS = {"a100_sxm_80", "b200", "h100_sxm", "h200_sxm", "l40s", "rtx_pro_6000"}
_NEWEST_PROFILE = "vllm-0.28"
# Blocks of the models after DeepSeek-V3, and those that both phases have.
_TODAYS = {"mhc_pre", "mhc_post", "encoder_attention"} | {
    f"{name}_{phase}{form}"
    for phase in ("prefill", "decode")
    for form, names in {
        "_module": ("mla", "dsa", "compressed_attention", "msa"),
        "": ("gated_delta", "kda", "causal_conv"),
    }.items()
    for name in names
}

Run = Callable[..., Result]


@pytest.fixture
def series(tmp_path: Path) -> StarterSeries:
    return StarterSeries(_DATA, tmp_path, PredictorConfig(state_folder=""))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Return a command's caller on an empty home with the starter."""

    def invoke(*words: str, starter: str = str(_DATA)) -> Result:
        environment = {"COLUMNS": "200", "FORETOKEN_PREDICTOR__STARTER": repr(starter)}
        return CliRunner().invoke(app, ["--home", str(tmp_path / "home"), *words], env=environment)

    return invoke


_PREDICT = ("predict", "all_reduce", "message_bytes=65536", "devices_per_node=8", "num_nodes=1")


def test_an_empty_home_answers_and_says_once_from_what(run: Run) -> None:
    first = run(*_PREDICT, "--device", "h200_sxm")
    assert first.exit_code == 0, first.output
    for text in ("estimated from the starter catalog", "Apache-2.0", "of the starter catalog"):
        assert text in first.output
    assert "estimated from the starter" not in run(*_PREDICT, "--device", "h200_sxm").output


def test_it_can_be_switched_off(run: Run) -> None:
    """By an option and by a key."""
    for words, starter in ((("--no-starter",), str(_DATA)), ((), "")):
        result = run(*words, *_PREDICT, "--device", "h200_sxm", starter=starter)
        assert (0, False) == (result.exit_code, "starter" in result.output), result.output


def test_what_a_configuration_says_is_obeyed() -> None:
    """A remote predictor has a starter of its own."""
    own = AppConfig(predictor={"starter": "/elsewhere"})
    assert own == with_starter(own, {})
    remote = AppConfig(endpoints=EndpointsConfig(predictor="host:1"))
    assert remote == with_starter(remote, {"FORETOKEN_PREDICTOR__STARTER": "/elsewhere"})
    said = with_starter(AppConfig(), {"FORETOKEN_PREDICTOR__STARTER": "/elsewhere"})
    assert {"starter": "/elsewhere"} == said.predictor
    assert AppConfig() == with_starter(AppConfig(), {"FORETOKEN_PREDICTOR__STARTER": "''"})


def test_it_is_told_of_once_in_a_home(tmp_path: Path) -> None:
    assert describe_starter(_DATA) in tell_once(tmp_path, _DATA)
    assert "" == tell_once(tmp_path, _DATA)


def test_it_is_small_and_says_whose_figures_they_are() -> None:
    """In the manifest of the dataset, and in a notice; at most 13 MB."""
    files = [path for path in _DATA.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 13_000_000
    manifest = json.loads((_DATA / "_manifest.json").read_text(encoding="utf-8"))
    assert ["Apache-2.0"] == [run["licence"] for run in manifest["runs"]]
    assert "aisimulate" in manifest["runs"][0]["source"]
    notice = (_DATA.parents[2] / "NOTICE").read_text(encoding="utf-8")
    assert "NVIDIA CORPORATION" in notice


def test_the_index_covers_every_row_of_every_file_once(series: StarterSeries) -> None:
    ends: dict[str, int] = {}
    for entry in series.entries:
        assert ends.get(entry.file, 0) == entry.first
        ends[entry.file] = entry.first + entry.num_points
    rows = {name: parquet.read_metadata(_DATA / name).num_rows for name in ends}
    assert ends == rows
    assert {str(path.relative_to(_DATA)) for path in _DATA.rglob("*.parquet")} == set(ends)


def test_it_knows_the_newest_software_of_six_gpus(series: StarterSeries) -> None:
    """GEMM of every GPU under each engine; on the H200 as the newest profile's own."""
    gemm = [key for key in series if key.operator == "gemm" and key.framework]
    assert _GPUS == {key.device for key in gemm} - {"b300"}
    engines = {key.framework.partition(" ")[0] for key in gemm if key.device == "h200_sxm"}
    assert {"vllm", "sglang", "trtllm"} == engines
    wanted = parse_software(find_engine(_NEWEST_PROFILE).software)
    related = {wanted.relate(key.framework, "gemm")[0] for key in gemm if "vllm" in key.framework}
    assert Relation.SAME in related
    assert find_engine(DEFAULT_PROFILE).engine in engines


@pytest.mark.parametrize("device", ["h100_sxm", "h200_sxm", "b200"])
def test_it_knows_the_blocks_of_todays_models(device: str, series: StarterSeries) -> None:
    """Of vLLM at least."""
    own = {key.operator for key in series if key.device == device and "vllm" in key.framework}
    assert set() == _TODAYS - own


def test_of_the_same_chip_it_has_what_the_other_does_not_tell(series: StarterSeries) -> None:
    """Collectives of a B300 and GB200, and the B300's FP4; all else is a B200's."""
    found = {
        device: {key.dtype for key in series if key.device == device}
        for device in ("b300", "gb200")
    }
    assert {"b300": {"", "fp4"}, "gb200": {""}} == found


def test_typical_efficiencies_are_of_this_revision() -> None:
    """When this fails, run `make starter-prior`."""
    assert "gemm on any gpu" in read_models(_DATA / PRIOR_NAME).transfers


def test_what_leaving_points_out_taught_is_of_this_revision(series: StarterSeries) -> None:
    """Of every series but small ones. When this fails, run `make starter-prior`."""
    found = read_tunings(_DATA / TUNING_NAME)
    large = [
        head
        for head in series.heads.values()
        if head.num_points >= 500 and not has_curves(head.key.spec)
    ]
    assert len(large) == len(found)
    head = min(large, key=lambda head: (head.num_points, head.key))
    taught, told = tune(series.train(head.key)), found.find(head.content_hash)
    assert told is not None
    assert taught.shares.tolist() == told.shares.tolist()
    np.testing.assert_allclose(taught.numbers, told.numbers, rtol=1e-3)


def test_measured_runs_are_found_by_what_they_are_like() -> None:
    """Nearest in lengths, then in layout and batch; none of another model or GPU."""
    assert (_DATA / STARTER_RUNS).is_file()
    runs = list_installed_runs(ArtifactShelf(), str(_DATA))
    asked = AskedRun(
        model="llama-3.1-8b",
        device="h200_sxm",
        input_tokens=4000,
        output_tokens=1000,
        tp=1,
        concurrency=96,
    )
    found = find_nearest(runs, asked)
    assert found is not None
    assert ("llama-3.1-8b", "h200_sxm", 1, 4000, 1000) == (
        found.model,
        found.device,
        found.num_devices,
        found.input_tokens,
        found.output_tokens,
    )
    assert f"{found.output_tps_per_gpu:,.0f} tokens/s per GPU" in found.describe()
    assert find_nearest([item for item in runs if item.device == "b200"], asked) is None


def test_the_demo_asks_about_lengths_at_which_the_starter_has_measured_runs() -> None:
    asked = DEPLOYMENT.scenario
    lengths = (asked.workload.prefill.mean, asked.workload.decode.mean)
    runs = list_installed_runs(ArtifactShelf(), str(_DATA))
    assert (asked.model.name, asked.device, *lengths) in {
        (run.model, run.device, run.input_tokens, run.output_tokens) for run in runs
    }
