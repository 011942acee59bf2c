"""`foretoken profile`: what is timed, known and refused; whole steps, and modules of a graph."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from foretoken.app.cli.main import app
from foretoken.app.cli.profile import read_points
from foretoken.app.cli.profile_model import (
    fasop_table,
    graph_table,
    parse_step,
    read_model_config,
    write_profiles,
)
from foretoken.app.module_times_file import read_module_times
from foretoken.catalog.importers.fasop.profile_rows import COLUMNS
from foretoken.domain import schema
from foretoken.domain.errors import InvalidRequestError, UnknownModelError, UnknownOperatorError
from foretoken.domain.measurements.estimate import DType, OperatorCall, Phase
from foretoken.domain.measurements.profiling import ClosureStep, GraphReport, ProfileRequest
from foretoken.domain.measurements.training_truth import ModuleTime, ModuleTimes

_HEADER = "operator,dtype,phase,num_tokens,hidden,gpu_s\n"

Run = Callable[..., Result]
_GATED = tuple(column.name for column in COLUMNS)
_CONFIG = {"num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture
def run(home_path: str) -> Run:
    def invoke(*words: object) -> Result:
        command = ["--home", home_path, "--output", "json", *map(str, words)]
        return CliRunner().invoke(app, command)

    return invoke


def answer(outcome: Result) -> Any:
    assert 0 == outcome.exit_code, outcome.output
    return json.loads(outcome.stdout)


@pytest.fixture
def points(tmp_path: Path) -> Path:
    path = tmp_path / "points.csv"
    path.write_text(_HEADER + "residual_add,fp32,forward,8,64,0.1\n", encoding="utf-8")
    return path


@pytest.mark.slow
def test_points_of_a_file_are_timed_once_and_then_known(run: Run, points: Path) -> None:
    first = answer(run("profile", "--quick", "--points", points))
    assert (first["num_measured"], first["num_planned"]) == (1, 1)
    assert [entry["operator"] for entry in first["operators"]] == ["residual_add"]
    second = answer(run("profile", "--quick", "--points", points))
    assert (second["num_measured"], second["num_skipped"]) == (0, 1)
    again = answer(run("profile", "--quick", "--points", points, "--again", "--name", "twice"))
    assert (again["num_measured"], again["name"]) == (1, "twice")


def test_dry_run_times_nothing_and_is_the_plan(run: Run) -> None:
    words = ("--device", "h200_sxm", "--model", "tiny-llama", "--tp", "1:2", "--quick")
    plan = answer(run("profile", "plan", *words))
    assert plan == answer(run("profile", "--dry-run", *words))
    assert plan["num_calls"] == sum(entry["num_calls"] for entry in plan["operators"]) > 100
    assert plan["estimated_s"] > 0.0


def test_request_of_another_process_is_taken_as_it_is(run: Run, tmp_path: Path) -> None:
    request = ProfileRequest(device="cpu", operators=("rope",), quick=True, name="mine")
    path = tmp_path / "request.json"
    path.write_text(json.dumps(schema.encode(request)), encoding="utf-8")
    plan = answer(run("profile", "--request", path, "--dry-run"))
    assert (plan["name"], [entry["operator"] for entry in plan["operators"]]) == ("mine", ["rope"])


@pytest.mark.slow
def test_profile_whose_every_case_fails_ends_with_a_status(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "huge.csv"
    path.write_text("operator,dtype,num_params\nadam,fp32,1000000000000\n", encoding="utf-8")
    config = tmp_path / "config.yaml"
    config.write_text("profiler: {call_s_max: 1e9}\n", encoding="utf-8")
    outcome = run("--config", config, "profile", "--quick", "--points", path)
    assert 1 == outcome.exit_code
    assert "every case failed" in outcome.output


def test_devices_are_those_present(run: Run) -> None:
    assert "cpu" in [row["device"] for row in answer(run("profile", "devices"))]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--operator", "gemmm"), "gemm"),
        (("--model", "lama-3.1-8b"), "llama-3.1-8b"),
        (("--device", "h200_sxm"), "the profiler's machine has no"),
        (("--kernels", "some"), "must be one of"),
        (("--shards", "2"), "--on kubernetes"),
        (("--on", "mars"), "local, kubernetes"),
    ],
)
def test_wrong_words_are_refused_with_what_is_right(
    run: Run, words: tuple[str, ...], message: str
) -> None:
    outcome = run("profile", *words)
    assert outcome.exit_code in (1, 2)
    assert message in " ".join(outcome.output.split())


def test_points_have_the_dimensions_of_their_operator(points: Path) -> None:
    call = OperatorCall(
        operator="residual_add",
        dtype=DType.FP32,
        phase=Phase.FORWARD,
        dims={"num_tokens": 8, "hidden": 64},
    )
    assert [call] == list(read_points(points))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("operator,m\ngemm,1\n", "has no column dtype"),
        (_HEADER + "residual_add,fp32,forward,x,64,0\n", "line 2: .*whole number"),
        (_HEADER + "residual_add,fp32,forward,8,,0\n", "line 2: .*hidden"),
        (_HEADER + "residual_add,fp33,forward,8,64,0\n", "line 2: .*fp32"),
    ],
)
def test_wrong_points_are_refused_with_their_line(
    tmp_path: Path, content: str, message: str
) -> None:
    path = tmp_path / "points.csv"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(InvalidRequestError, match=message):
        list(read_points(path))


def test_points_of_an_operator_nobody_knows_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "points.csv"
    path.write_text("operator,dtype\ngemmm,fp32\n", encoding="utf-8")
    with pytest.raises(UnknownOperatorError, match="gemm"):
        list(read_points(path))


pytest.importorskip("transformers")

_SMALL = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 96,
    "max_position_embeddings": 64,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("closure")
    (path / "small.json").write_text(json.dumps(_SMALL))
    return path


@pytest.fixture(scope="module")
def run_in_folder(folder: Path) -> Run:
    def invoke(*words: object) -> Result:
        return CliRunner().invoke(app, ["--home", str(folder / "home"), *map(str, words)])

    return invoke


@pytest.fixture(scope="module")
def profiled(folder: Path, run_in_folder: Run) -> Result:
    steps = ("--step", "prefill:1x8", "--step", "decode:2x8", "--step", "decode:2x8:graph")
    out = folder / "out.json"
    return run_in_folder(
        "profile", "closure", folder / "small.json", *steps, "--quick", "--out", out
    )


@pytest.mark.slow
def test_measured_steps_are_listed_and_failed_ones_say_why(profiled: Result) -> None:
    """The table names steps as the option does."""
    assert 0 == profiled.exit_code, profiled.output
    for text in ("small on cpu (2 layers, fp32", "prefill:1x8", "decode:2x8:graph"):
        assert text in profiled.output
    assert "graphs are captured on CUDA devices alone" in profiled.output


@pytest.mark.slow
def test_the_file_and_the_catalog_hold_the_same_report(
    profiled: Result, folder: Path, run_in_folder: Run
) -> None:
    """Either can be named to compare with."""
    written = json.loads((folder / "out.json").read_text())
    assert 0 == profiled.exit_code
    by_file = run_in_folder("--output", "json", "validate", "steps", folder / "out.json")
    by_name = run_in_folder("--output", "json", "validate", "steps", written["name"])
    of_all = run_in_folder("--output", "json", "validate", "steps")
    assert 0 == by_file.exit_code, by_file.output
    (compared,) = json.loads(by_file.stdout)
    assert [compared] == json.loads(by_name.stdout) == json.loads(of_all.stdout)
    kinds = [step["measured"]["step"]["kind"] for step in compared["steps"]]
    assert ["prefill", "decode"] == kinds


@pytest.mark.slow
def test_predictions_are_printed_beside_measurements_and_on_a_page(
    profiled: Result, folder: Path, run_in_folder: Run
) -> None:
    """Every step has its error, what it rests on, and the host's times are asked for."""
    assert 0 == profiled.exit_code
    page = folder / "steps.html"
    result = run_in_folder("validate", "steps", folder / "out.json", "--html", page)
    assert 0 == result.exit_code, result.output
    assert "errors of 2 steps: median" in result.output
    assert "foretoken profile host --device cpu" in " ".join(result.output.split())
    assert "small on cpu: what steps consist of" in page.read_text()


@pytest.mark.slow
def test_the_operators_of_the_steps_can_be_profiled_by_a_request(
    profiled: Result, folder: Path, run_in_folder: Run
) -> None:
    """Each call stands in it once, the failed steps' included."""
    assert 0 == profiled.exit_code
    path = folder / "request.json"
    result = run_in_folder("validate", "steps", folder / "out.json", "--request", path)
    assert 0 == result.exit_code, result.output
    request = schema.decode(ProfileRequest, json.loads(path.read_text()))
    named = [(call.operator, call.variant, *sorted(call.dims.items())) for call in request.calls]
    assert len(set(named)) == len(named)
    operators = {name for name, *_ in named}
    assert {"gemm", "attention_prefill", "attention_decode", "rope", "rms_norm"} <= operators
    assert "cpu" == request.device


@pytest.mark.slow
def test_a_report_that_is_nowhere_is_refused(profiled: Result, run_in_folder: Run) -> None:
    """The message names those there are."""
    assert 0 == profiled.exit_code
    result = run_in_folder("validate", "steps", "nowhere")
    assert 1 == result.exit_code
    assert "nowhere is no file" in result.output
    assert "small-cpu-" in result.output


def test_an_empty_catalog_says_what_to_run(home_path: str) -> None:
    """There is nothing to compare yet."""
    words = ["--home", home_path, "validate", "steps"]
    result = CliRunner().invoke(app, words)
    assert 1 == result.exit_code
    assert "run `foretoken profile closure` first" in result.output


def test_steps_are_written_as_kind_sequences_tokens_and_mode() -> None:
    """Eager is what is meant without a mode."""
    assert ClosureStep(kind="decode", batch_size=8, num_tokens=1024) == parse_step("decode:8x1024")
    compiled = ClosureStep(kind="training", batch_size=2, num_tokens=256, mode="compiled")
    assert compiled == parse_step("training:2x256:compiled")


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("decode", "is not KIND:SEQUENCESxTOKENS"),
        ("decode:8", "is not KIND:SEQUENCESxTOKENS"),
        ("decode:axb", "is not KIND:SEQUENCESxTOKENS"),
        ("serve:8x8", "must be one of prefill, decode, training"),
        ("decode:8x8:fast", "must be one of eager, compiled, graph"),
        ("decode:0x8", "must be at least 1"),
    ],
)
def test_words_that_name_no_step_are_refused(word: str, message: str) -> None:
    """The message shows how one is written."""
    with pytest.raises(InvalidRequestError, match=message):
        parse_step(word)


def test_a_number_format_goes_by_its_name(folder: Path, run_in_folder: Run) -> None:
    refused = run_in_folder("profile", "closure", folder / "small.json", "--dtype", "half")
    assert (1, True) == (refused.exit_code, "half" in refused.output)


def test_models_are_presets_or_files(folder: Path) -> None:
    """A preset has a config written for it, a file gives its own text and its name."""
    name, text = read_model_config("tiny-llama")
    assert ("tiny-llama", 8) == (name, json.loads(text)["num_hidden_layers"])
    name, text = read_model_config(str(folder / "small.json"))
    assert ("small", _SMALL) == (name, json.loads(text))
    with pytest.raises(UnknownModelError):
        read_model_config("no-such-model")


def _profile(modules: tuple[str, ...] = _GATED, tp: int = 1, **facts: object) -> ModuleTimes:
    """Return a profile of micro batches of 1 and 2; a module takes 1000 us more than the last."""
    times = tuple(
        ModuleTime(
            module=module,
            micro_batch_size=size,
            forward_us=1000.0 * (place + 1) * size,
            backward_us=2000.0 * (place + 1) * size,
            is_whole=module == "lm_head" and tp > 1,
        )
        for size in (1, 2)
        for place, module in enumerate(modules)
    )
    plain = ModuleTimes(
        source="graph of tiny",
        model="tiny",
        device="cpu",
        tp=tp,
        sequence_length=8,
        dtype=DType.FP32,
        measures="intervals",
        times=times,
    )
    return dataclasses.replace(plain, **facts)  # type: ignore[arg-type]


def _report(*profiles: ModuleTimes) -> GraphReport:
    return GraphReport(
        run_id="graph-cpu-tiny",
        device="cpu",
        model="tiny",
        num_layers=4,
        num_layers_timed=2,
        num_nodes=138,
        profiles=profiles,
        notes=("2 of 4 layers were built",),
    )


@pytest.mark.parametrize("tp", [1, 2])
def test_own_profiles_round_trip(tp: int, tmp_path: Path) -> None:
    """The JSON is read back as the profile that was written, backward times included."""
    profile = _profile(tp=tp)
    write_profiles(_report(profile), _CONFIG, tmp_path)
    assert profile == read_module_times(tmp_path / f"tiny_CPU_{tp}.json", {})


def test_a_model_of_a_hostile_name_is_not_written_elsewhere(tmp_path: Path) -> None:
    """The report may come from another machine's service or catalog."""
    folder = tmp_path / "below" / "out"
    profile = dataclasses.replace(_profile(), model="../../climbed")
    with pytest.raises(InvalidRequestError, match=r"out: .* leads out of its folder"):
        write_profiles(_report(profile), _CONFIG, folder)
    assert [folder.parent, folder] == sorted(tmp_path.rglob("*"))


def test_tables_round_trip(tmp_path: Path) -> None:
    """FASOP's table is read back with equal forward times; what it does not say is given."""
    profile = _profile()
    write_profiles(_report(profile), _CONFIG, tmp_path)
    facts = {"device": "cpu", "sequence_length": 8, "dtype": "fp32"}
    read = read_module_times(tmp_path / "tiny_CPU_1.npz", facts)
    assert ("tiny", "cpu", 1, "intervals") == (read.model, read.device, read.tp, read.measures)
    expected = [(item.module, item.micro_batch_size, item.forward_us) for item in profile.times]
    found = [(item.module, item.micro_batch_size, item.forward_us) for item in read.times]
    assert sorted(expected) == sorted(found)


def test_table_layout(tmp_path: Path) -> None:
    """A table is one array `data` of ms: a row per micro batch, ten columns in FASOP's order."""
    write_profiles(_report(_profile()), _CONFIG, tmp_path)
    with np.load(tmp_path / "tiny_CPU_1.npz", allow_pickle=False) as content:
        assert ["data"] == content.files
        data = content["data"]
    assert (2, 10) == data.shape
    assert np.float64 == data.dtype
    expected = [[size * (place + 1.0) for place in range(10)] for size in (1, 2)]
    assert expected == data.tolist()


def test_fused_projections_are_shared() -> None:
    """Queries, keys and values take their widths' share; what a model has not takes no time."""
    modules = ("embed", "qkv_proj", "attn_o", "mlp_up", "mlp_down", "lm_head")
    table, reason = fasop_table(_profile(modules), _CONFIG)
    assert "" == reason
    first = dict(zip(_GATED, table[0].tolist(), strict=True))
    assert (1.0, 0.5, 0.5) == (first["attn_q"], first["attn_k"], first["attn_v"])
    assert (0.0, 0.0, 4.0) == (first["mlp_gate"], first["mlp_act_fn"], first["mlp_up"])


def test_layers_that_differ_count_by_their_mean() -> None:
    """A table has one value for all layers."""
    times = tuple(
        dataclasses.replace(item, layer=layer, forward_us=item.forward_us * (layer + 1))
        for item in _profile().times
        for layer in (0, 1)
    )
    table, _ = fasop_table(_profile(times=times), _CONFIG)
    assert [1.5, 3.0] == table[0, :2].tolist()


@pytest.mark.parametrize(
    ("modules", "what"),
    [
        (("embed", "attn_q", "attn_k", "attn_v", "attn_o", "mlp", "lm_head"), "no column for mlp"),
        (("embed", "layer", "lm_head"), "no column for layer"),
        (("embed", "attn_q", "attn_o", "mlp_up", "mlp_down", "lm_head"), "no attn_k, attn_v"),
    ],
)
def test_what_fasop_has_no_columns_for(modules: tuple[str, ...], what: str, tmp_path: Path) -> None:
    """A model with other modules has no table, which is said, but a profile of its own."""
    lines = write_profiles(_report(_profile(modules)), _CONFIG, tmp_path)
    assert any(what in line for line in lines)
    assert ["tiny_CPU_1.json"] == [path.name for path in tmp_path.iterdir()]


def test_nothing_to_write(tmp_path: Path) -> None:
    """Without a profile nothing is written, and that is said."""
    lines = write_profiles(_report(), _CONFIG, tmp_path / "new")
    assert ["no profile came of it: nothing is written"] == lines


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    """A file in the folder's place is an error that names it."""
    taken = tmp_path / "taken"
    taken.write_text("", encoding="utf-8")
    with pytest.raises(InvalidRequestError, match="taken"):
        write_profiles(_report(_profile()), _CONFIG, taken)


def test_the_table_shows_both_passes(capsys: pytest.CaptureFixture[str]) -> None:
    """A cell has the ms of both passes; notes follow the tables."""
    Console(width=200).print(graph_table(_report(_profile())))
    shown = capsys.readouterr().out
    assert "attn_q" in shown
    assert "2 / 4" in shown
    assert "each of 4" in shown
    assert "- 2 of 4 layers were built" in shown


@pytest.mark.parametrize("text", ["0", "1,x", "-1"])
def test_tensor_parallel_sizes_are_counts(text: str, tmp_path: Path) -> None:
    words = ["--home", str(tmp_path), "profile", "graph", "tiny-llama", "--tp", text]
    outcome = CliRunner().invoke(app, words)
    assert (1, True) == (outcome.exit_code, "tp" in outcome.output)


def test_a_model_that_cannot_be_split_ends_with_a_status_and_the_reason(tmp_path: Path) -> None:
    config = str(Path(__file__).resolve().parents[3] / "docs" / "examples" / "small-llama.json")
    words = ["--home", str(tmp_path), "profile", "graph", config, "--seq-len", "32", "--tp", "3"]
    outcome = CliRunner().invoke(app, words)
    assert 1 == outcome.exit_code
    assert "num_attention_heads 8 does not divide by 3" in outcome.output
