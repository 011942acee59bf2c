"""Every simulation, search and page says which question it answers and what that rests on."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from slow_cases import slow_but
from typer.testing import CliRunner, Result

from foretoken.app.cli.main import app

Run = Callable[..., Result]

# A step that waits for its host rests on no estimate for so long.
_SERVING = (
    "model: tiny-llama\ndevice: h200\nworkload: {rate_rps: 3, num_requests: 5}\n"
    "engine: {rules: {piece_us: 0}}\n"
)
_TRAINING = "model: tiny-llama\ndevice: h200\nsequence_length: 128\nglobal_batch_size: 8\n"
_SPACE = "--vary tp=1 --vary pp=1 --vary micro_batch_size=1 --finalists 1"
# A command with a page, and what its question says.
_COMMANDS = {
    "simulate serving": ("{folder}/serving.yaml --html {page}", "tiny-llama in bf16; on 1 x h200"),
    "simulate training": ("{folder}/training.yaml --html {page}", "training tiny-llama in bf16"),
    "simulate run": ("{folder}/training.yaml --tokens 1e6 --html {page}", "1e+06 tokens"),
    "search capacity": (
        "{folder}/serving.yaml --attainment 0.5 --set slo.ttft_ms=1000 --max-rate 1 --out {page}",
        "the highest rate of tiny-llama",
    ),
    "search serving": (
        "{folder}/serving.yaml --gpus 1 --finalists 1 --batch 4 --mode aggregated --out {page}",
        "on up to 1 x h200_sxm",
    ),
    "search training": (
        "{folder}/training.yaml --gpus 1 --page {page} " + _SPACE,
        "the best strategy of training tiny-llama",
    ),
    "search training on several types": (
        (
            "--model tiny-llama --nodes h200=1x8 --nodes a100=1x8 --sequence-length 128"
            " --global-batch-tokens 1024 --page {page} --vary tp=1 --vary micro_batch_size=1"
            " --finalists 1"
        ),
        "on 1 node of h200_sxm and 1 node of a100_sxm_80",
    ),
}
_NARROWED = "foretoken profile --device h200_sxm"


@pytest.fixture
def run(tmp_path: Path, home_path: str) -> Run:
    (tmp_path / "serving.yaml").write_text(_SERVING)
    (tmp_path / "training.yaml").write_text(_TRAINING)

    def invoke(*words: object) -> Result:
        return CliRunner(env={"COLUMNS": "400"}).invoke(
            app, ["--home", home_path, *map(str, words)], catch_exceptions=False
        )

    return invoke


def _words(name: str, folder: Path) -> list[str]:
    command = name.removesuffix(" on several types").split()
    options = _COMMANDS[name][0].format(folder=folder, page=folder / "page.html")
    return [*command, *options.split()]


@pytest.mark.parametrize(
    "name",
    slow_but(["simulate serving", "simulate training", "simulate run"], _COMMANDS),
)
def test_terminal_page_and_kept_report_say_the_same(run: Run, tmp_path: Path, name: str) -> None:
    result = run(*_words(name, tmp_path))
    assert result.exit_code in (0, 3), result.output
    page = (tmp_path / "page.html").read_text()
    for said in (result.stdout, page):
        assert _COMMANDS[name][1] in said
        assert "100 % data sheet, by time" in said
        assert _NARROWED in said
        assert "expected error" in said
    assert "question: " in result.stdout
    kept = run("--output", "json", "results", "show", "latest")
    echo: dict[str, Any] = json.loads(kept.stdout)["echo"]
    assert _COMMANDS[name][1] in echo["question"]
    assert echo["time_ratio_by_provenance"]["analytical"] == pytest.approx(1.0)
    assert sum(echo["time_ratio_by_provenance"].values()) == pytest.approx(1.0)
    assert _NARROWED in echo["narrowing"]
    assert "`foretoken catalog install nvidia`" in echo["narrowing"]


def test_memory_rests_on_no_measurement(run: Run, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    said = run("memory", "--model", "tiny-llama", "--device", "h200", "--page", page).stdout
    for text in (said, page.read_text()):
        assert "expected error" in text
        assert "training tiny-llama in bf16 (trainer plain); on 1 x h200_sxm" in text
        assert "counted sizes of what training holds" in text
    assert '<dl class="about">\n<dt>question</dt>' in page.read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "best"),
    [
        ("search serving", "the best, 1 x tp1 b4 "),
        ("search training", "the best, tp1 pp1 dp1 "),
        ("search training on several types", "the best, tp1 pp2 dp8 mbs1 "),
    ],
)
def test_what_was_not_simulated_tells_its_shares(
    run: Run, tmp_path: Path, name: str, best: str
) -> None:
    words = [*_words(name, tmp_path), "--finalists", "0"]
    page = tmp_path / "page.html"
    for said in (run(*words).stdout, page.read_text()):
        assert f"100 % data sheet, by time ({best}" in said
        assert f"{_NARROWED} --model tiny-llama --tp 1" in said


def test_a_prediction_tells_the_call_and_what_would_measure_it(run: Run) -> None:
    said = run("predict", "gemm", "m=8", "n=64", "k=64", "--device", "h200").stdout
    assert "question: gemm m=8 n=64 k=64 in bf16 forward on h200_sxm" in said
    assert "rests on: 100 % data sheet, by time" in said
    assert "`foretoken profile --device h200_sxm --operator gemm --dtype bf16`" in said


def test_a_prediction_tells_everything_that_was_asked(run: Run) -> None:
    words = ("m=8", "n=64", "k=64", "dtype=fp8", "variant=quant=fp8_block", "framework=vllm 0.24")
    said = run("predict", "gemm", *words, "--device", "h200").stdout
    assert "in fp8 forward quant=fp8_block vllm 0.24 on h200_sxm" in said
    assert "--operator gemm --dtype fp8`" in said


@pytest.mark.parametrize(
    ("words", "narrowing"),
    [
        (("launch_gap", "num_kernels=1"), "`foretoken profile host --device h200_sxm`"),
        (
            (
                *("all_reduce", "message_bytes=1024", "devices_per_node=2", "num_nodes=1"),
                *("--topology", "h200_hgx"),
            ),
            "`foretoken profile collectives --device h200_sxm --operator all_reduce --dtype bf16`",
        ),
        (
            ("lora_gemm", "num_slots=2", "num_active=1", "m=8", "n=8", "k=8"),
            "`foretoken catalog import generic FILE`",
        ),
    ],
)
def test_what_would_measure_it_goes_by_the_kind_of_operator(
    run: Run, words: tuple[str, ...], narrowing: str
) -> None:
    said = run("predict", *words, "--device", "h200")
    assert narrowing in said.stdout, said.output


@pytest.mark.parametrize("more", [(), ("--explain",)])
def test_a_prediction_in_json_carries_it(run: Run, more: tuple[str, ...]) -> None:
    words = ("predict", "gemm", "m=8", "n=64", "k=64", "--device", "h200", *more)
    echo: dict[str, Any] = json.loads(run("--output", "json", *words).stdout)["echo"]
    assert echo["question"] == "gemm m=8 n=64 k=64 in bf16 forward on h200_sxm"
    assert echo["time_ratio_by_provenance"] == {"analytical": 1.0}
    assert "`foretoken profile --device h200_sxm --operator gemm --" in echo["narrowing"]


def test_what_is_emulated_is_remarked(run: Run, tmp_path: Path) -> None:
    changes = ("--set", "device=a100", "--set", "quantization=fp8")
    said = run("simulate", "serving", tmp_path / "serving.yaml", *changes).stdout
    assert "note: a100_sxm_80 (ampere) has no fp8" in said
    assert "vllm runs fp8 with Marlin kernels" in said


def test_a_comparison_tells_the_question_of_each_run(run: Run, tmp_path: Path) -> None:
    for rate in (3, 4):
        assert run("simulate", "serving", tmp_path / "serving.yaml", "--rate", rate).exit_code == 0
    page = tmp_path / "compare.html"
    result = run("compare", "latest~1", "latest", "--page", page)
    assert result.exit_code == 0, result.output
    for text in ("A, question", "B, question", "100 % data sheet, by time"):
        assert text in result.stdout
        assert text in page.read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    "parts", [("--device", "a30"), ("--nodes", "a30=4x1", "--nodes", "gh200=4x1")]
)
def test_a_search_over_nodes_of_one_device_asks_for_no_neighbour_on_them(
    run: Run, parts: tuple[str, ...]
) -> None:
    sizes = ("--gpus", "4") if "--device" in parts else ()
    command = ("search", "training", "--model", "tiny-llama", *parts, *sizes)
    result = run(*command, "--global-batch-tokens", "65536", "--finalists", "1")
    assert (0, True) == (result.exit_code, "rests on: 100 % data sheet" in result.stdout)
