"""Measured runs are recognised by their content, read as they stand, and bad ones are explained."""

import copy
import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from foretoken.domain.errors import InvalidRequestError, UnknownPluginError
from foretoken.domain.requests.serving_run import MeasuredRequest, ServingRun, encode_run
from foretoken.simulator.validation.measured_run import load_run, load_runs

_SHARED = Path(__file__).resolve().parents[4] / ".." / "shared" / "data"
_RUNS = _SHARED / "llmservingsim" / "runs"

_VLLM: dict[str, Any] = {
    "date": "20261101-120000",
    "endpoint_type": "vllm",
    "backend": "vllm",
    "model_id": "meta-llama/Llama-3.1-8B",
    "num_prompts": 3,
    "request_rate": 2.0,
    "burstiness": 1.0,
    "max_concurrency": None,
    "duration": 2.0,
    "completed": 2,
    "failed": 1,
    "input_lens": [100, 200, 300],
    "output_lens": [3, 2, 0],
    "ttfts": [0.1, 0.2, 0.0],
    "itls": [[0.02, 0.03], [0.05], []],
    "start_times": [1000.5, 1001.0, 1002.0],
    "generated_texts": ["a", "b", ""],
    "errors": ["", "", "Bad Gateway"],
}
_OURS = MeasuredRequest(
    arrival_s=1.0,
    first_token_s=1.25,
    last_token_s=1.5,
    num_prefill_tokens=10,
    num_decode_tokens=2,
    chunk_s=(1.25, 1.5),
    chunk_tokens=(1, 1),
)
_SUMMARY = {"mean_ttft_ms": 1.0, "median_ttft_ms": 1.0, "request_throughput": 1.0}


def _write(path: Path, content: Any) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def _times(request: MeasuredRequest) -> tuple[float, ...]:
    return tuple(
        round(time_s, 6)
        for time_s in (request.arrival_s, request.first_token_s, request.last_token_s)
    )


def test_vllm_results_have_times_from_the_first_start(tmp_path: Path) -> None:
    run = load_run(_write(tmp_path / "result.json", _VLLM))
    first, second = run.completed
    assert ((0.0, 0.1, 0.15), (0.5, 0.7, 0.75)) == (_times(first), _times(second))
    assert (100, 3, 3) == (first.num_prefill_tokens, first.num_decode_tokens, len(first.chunk_s))
    assert (1, "Bad Gateway") == (run.num_failed, run.requests[2].error)
    assert (0, "vllm bench serve") == (run.concurrency, run.source)


def test_vllm_results_of_a_closed_loop_need_no_start_times(tmp_path: Path) -> None:
    """Each request was sent when one of those under way was complete."""
    content = {**_VLLM, "max_concurrency": 2, "request_rate": "inf", "errors": ["", "", ""]}
    del content["start_times"]
    content |= {"output_lens": [3, 2, 1], "ttfts": [0.1, 0.2, 0.1]}
    run = load_run(_write(tmp_path / "result.json", content))
    assert [0.0, 0.0, 0.15] == [round(request.arrival_s, 6) for request in run.completed]
    assert 2 == run.concurrency


def test_vllm_results_without_start_times_are_refused(tmp_path: Path) -> None:
    content = {name: value for name, value in _VLLM.items() if name != "start_times"}
    with pytest.raises(InvalidRequestError, match=r"start_times.*foretoken collect"):
        load_run(_write(tmp_path / "result.json", content))


def test_vllm_summaries_say_how_to_get_details(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="--save-detailed"):
        load_run(_write(tmp_path / "result.json", _SUMMARY))


def test_a_file_of_several_results_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="holds 2 results"):
        load_run(_write(tmp_path / "results.jsonl", _lines(_VLLM, _VLLM)))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"ttfts": [0.1]}, "ttfts: has 1 entries, and input_lens 3"),
        ({"itls": 5}, "itls: expected a list"),
        ({"output_lens": [3, "two", 0]}, "request 1: expected a number of tokens, found 'two'"),
        ({"ttfts": [-0.1, 0.2, 0.0]}, "request 0: a time below 0"),
    ],
)
def test_bad_vllm_results_name_the_place(tmp_path: Path, change: Any, problem: str) -> None:
    with pytest.raises(InvalidRequestError, match=rf"result\.json:{problem}"):
        load_run(_write(tmp_path / "result.json", {**_VLLM, **change}))


def _aiperf_record(start_ns: int, **changes: Any) -> dict[str, Any]:
    return {
        "metadata": {"request_start_ns": start_ns, "benchmark_phase": "profiling"},
        "metrics": {
            "input_sequence_length": {"value": 550, "unit": "tokens"},
            "time_to_first_token": {"value": 250.0, "unit": "ms"},
            "request_latency": {"value": 0.3, "unit": "s"},
            "inter_chunk_latency": {"value": [20.0, 30.0], "unit": "ms"},
            "output_sequence_length": {"value": 3, "unit": "tokens"},
        },
        "error": None,
        **changes,
    }


def _lines(*records: Any) -> str:
    return "\n".join(json.dumps(record) for record in records) + "\n"


def test_aiperf_records_are_read_in_their_units(tmp_path: Path) -> None:
    warm_up = _aiperf_record(1)
    warm_up["metadata"]["benchmark_phase"] = "warmup"
    failed = _aiperf_record(
        3_000_000_000, metrics={}, error={"code": 500, "message": "server error"}
    )
    text = _lines(warm_up, _aiperf_record(2_000_000_000), failed, _aiperf_record(2_500_000_000))
    _write(tmp_path / "profile_export.jsonl", text)
    summary = {"input_config": {"loadgen": {"concurrency": 4}}}
    _write(tmp_path / "profile_export_aiperf.json", summary)
    run = load_run(tmp_path)
    assert [(0.0, 0.25, 0.3), (0.5, 0.75, 0.8)] == [_times(r) for r in run.completed]
    assert (550, 3, 3) == (
        run.completed[0].num_prefill_tokens,
        run.completed[0].num_decode_tokens,
        len(run.completed[0].chunk_s),
    )
    assert (["server error"], 4) == ([r.error for r in run.requests if r.error], run.concurrency)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (_lines(_aiperf_record(1)) + "{broken\n", "2: expected a JSON object"),
        (_lines(_aiperf_record(1), {"metrics": {}}), "2: expected an object with `metadata`"),
        (_lines(_aiperf_record(1, metrics={})), "1: expected metrics.time_to_first_token"),
        (
            _lines({"metadata": {}, "metrics": {}}),
            "1: expected metadata.request_start_ns in ns, found None",
        ),
    ],
)
def test_bad_aiperf_records_name_the_line(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(InvalidRequestError, match=rf"export\.jsonl:{problem}"):
        load_run(_write(tmp_path / "profile_export.jsonl", text))


def _event(text: str, usage: dict[str, int] | None = None) -> dict[str, str]:
    content = {"choices": [{"text": text}] if text else [], "usage": usage}
    return {"response": f"data: {json.dumps(content)}\n\n"}


def _genai_perf(usage: dict[str, int] | None) -> dict[str, Any]:
    done = {"response": "data: [DONE]\n\n"}
    requests = [
        {
            "timestamp": start,
            "response_timestamps": [start + 10**8, start + 2 * 10**8, start + 3 * 10**8],
            "response_outputs": [_event("a"), _event("b", usage), done],
        }
        for start in (5 * 10**9, 6 * 10**9)
    ]
    return {
        "service_kind": "openai",
        "experiments": [{"experiment": {"mode": "concurrency", "value": 2}, "requests": requests}],
    }


def test_genai_perf_counts_tokens_by_usage(tmp_path: Path) -> None:
    usage = {"prompt_tokens": 77, "completion_tokens": 5}
    run = load_run(_write(tmp_path / "profile_export.json", _genai_perf(usage)))
    assert [(0.0, 0.1, 0.2), (1.0, 1.1, 1.2)] == [_times(request) for request in run.completed]
    assert {(77, 5)} == {(r.num_prefill_tokens, r.num_decode_tokens) for r in run.completed}
    assert 2 == run.concurrency


def test_genai_perf_takes_input_lengths_from_the_summary_if_all_are_alike(tmp_path: Path) -> None:
    path = _write(tmp_path / "profile_export.json", _genai_perf(None))
    with pytest.raises(InvalidRequestError, match=r"requests\[0\]: .*include_usage"):
        load_run(path)
    summary = {"input_sequence_length": {"avg": 128.0, "std": 0.5}}
    _write(tmp_path / "profile_export_genai_perf.json", summary)
    assert {(128, 2)} == {
        (r.num_prefill_tokens, r.num_decode_tokens) for r in load_run(path).completed
    }


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({"experiments": []}, "experiments: holds 0 experiments"),
        ({"experiments": [{"requests": []}]}, r"experiments\[0\].requests: expected a list"),
        ({"experiments": [{"requests": [{}]}]}, r"requests\[0\]: expected a `timestamp` in ns"),
    ],
)
def test_bad_genai_perf_files_name_the_place(tmp_path: Path, content: Any, problem: str) -> None:
    with pytest.raises(InvalidRequestError, match=problem):
        load_run(_write(tmp_path / "profile_export.json", content))


@pytest.mark.parametrize(
    "text",
    [
        "arrival_s,input_tokens,output_tokens,first_token_s,last_token_s\n1,10,3,1.5,2.5\n",
        "Arrived_At,prompt_tokens,completion_tokens,TTFT_ms,e2e_ms\n1,10,3,500,1500\n",
        "start_time_ms,input_len,output_len,ttft,tpot_ms\n1000,10,3,0.5,500\n",
    ],
)
def test_tables_may_use_any_usual_name_and_unit(tmp_path: Path, text: str) -> None:
    (request,) = load_run(_write(tmp_path / "run.csv", text)).completed
    assert (0.0, 0.5, 1.5) == _times(request)
    assert (10, 3) == (request.num_prefill_tokens, request.num_decode_tokens)


_HEADER = "arrival_s,input_tokens,output_tokens,ttft_ms,e2e_ms\n"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (_HEADER + "0,10,3,50,90\nx,10,3,50,90\n", "3: arrival: expected a number, found 'x'"),
        (_HEADER + "0,1.5,3,50,90\n", "2: input_tokens: expected a whole number"),
        (_HEADER + "0,10,3,50\n", "2: expected 5 cells, found 4"),
        (_HEADER + "0,10,3,50,20\n", "2: request: last_token_s: is 0.02, before the first token"),
        (_HEADER + "-1,10,3,50,90\n", "2: arrival: expected a time of at least 0"),
        (_HEADER + "nan,10,3,50,90\n", "2: arrival: expected a finite number"),
    ],
)
def test_bad_tables_name_the_line(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(InvalidRequestError, match=rf"run\.csv:{problem}"):
        load_run(_write(tmp_path / "run.csv", text))


def test_a_table_without_the_columns_says_which_it_needs(tmp_path: Path) -> None:
    path = _write(tmp_path / "run.csv", "when,tokens\n1,2\n")
    with pytest.raises(InvalidRequestError, match=r"in no format known here.*CSV table"):
        load_run(path)
    with pytest.raises(InvalidRequestError, match=r"1: expected a header.*found when,tokens"):
        load_run(path, "table")


def test_our_own_files_are_read_and_later_versions_refused(tmp_path: Path) -> None:
    text = encode_run(ServingRun(name="mine", requests=(_OURS,)))
    run = load_run(_write(tmp_path / "run.json", text))
    assert ("mine", (0.0, 0.25, 0.5)) == (run.name, _times(run.completed[0]))
    assert (0.25, 0.5) == run.completed[0].chunk_s
    later = _write(tmp_path / "later.json", text.replace('"version": 1', '"version": 2'))
    with pytest.raises(InvalidRequestError, match=r"later\.json: version: is 2"):
        load_run(later)
    unknown = _write(tmp_path / "other.json", text.replace('"arrival_s"', '"arrived"'))
    with pytest.raises(InvalidRequestError, match=r"requests\[0\].arrived: unknown key"):
        load_run(unknown)


def test_a_run_in_which_nothing_was_completed_is_refused(tmp_path: Path) -> None:
    text = "arrival_s,input_tokens,output_tokens,ttft_ms,e2e_ms,error\n0,10,0,,,refused\n"
    with pytest.raises(InvalidRequestError, match="no completed request, and 1 that failed"):
        load_run(_write(tmp_path / "run.csv", text))


@pytest.mark.parametrize("content", ["[1, 2]", "{}", "\x00\x01", '{"x": "%s"}' % ("a" * 200_000)])
def test_other_content_is_in_no_format(tmp_path: Path, content: str) -> None:
    with pytest.raises(InvalidRequestError, match="no format known here"):
        load_run(_write(tmp_path / "file", content))


@pytest.mark.parametrize("indent", [None, 1])
def test_a_file_that_is_half_written_says_where_it_ends(tmp_path: Path, indent: int | None) -> None:
    text = json.dumps(_VLLM, indent=indent)
    for content in (text[: len(text) // 2], "{", "[" * 100_000):
        path = _write(tmp_path / "run.json", content)
        with pytest.raises(InvalidRequestError, match=r"run\.json: is no complete JSON: .+"):
            load_run(path)
        with pytest.raises(InvalidRequestError, match="is no complete JSON"):
            load_run(path, "foretoken_run")


def test_an_empty_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"run\.json: is empty"):
        load_run(_write(tmp_path / "run.json", "\n"))


def test_a_cell_that_no_table_can_hold_is_said(tmp_path: Path) -> None:
    text = "arrival_s,input_tokens,output_tokens,ttft_ms,e2e_ms\n0,10,2,5,9\n1,%s,2,5,9\n"
    with pytest.raises(InvalidRequestError, match=r"run\.csv:3: field larger"):
        load_run(_write(tmp_path / "run.csv", text % ("9" * 200_000)))


def test_completed_requests_need_the_length_of_their_prompts(tmp_path: Path) -> None:
    text = "arrival_s,input_tokens,output_tokens,ttft_ms,e2e_ms\n0,10,2,5,9\n1,0,2,5,9\n"
    with pytest.raises(InvalidRequestError, match=r"1 of 2 .* prompt; .* number 2 by"):
        load_run(_write(tmp_path / "run.csv", text))


def test_files_that_cannot_be_read_are_said(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"nowhere\.json"):
        load_run(tmp_path / "nowhere.json")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidRequestError, match="binary"):
        load_run(tmp_path / "binary")
    with pytest.raises(InvalidRequestError, match=r"a folder without .*profile_export\.jsonl"):
        load_run(tmp_path)
    with pytest.raises(UnknownPluginError, match="aiperf"):
        load_run(tmp_path / "binary", "aiperv")


_WRONG_VALUES: tuple[Any, ...] = (None, -1, 1e400, float("nan"), "x", [], {"a": 1}, [1], 10**30)


def _places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the way to every value inside a value."""
    yield place
    pairs = value.items() if isinstance(value, dict) else ()
    for key, item in enumerate(value) if isinstance(value, list) else pairs:
        yield from _places(item, (*place, key))


@pytest.mark.parametrize(
    "records",
    [
        [_VLLM],
        [_aiperf_record(5), _aiperf_record(9)],
        [_genai_perf({"prompt_tokens": 7, "completion_tokens": 5})],
        [json.loads(encode_run(ServingRun(requests=(_OURS,))))],
    ],
    ids=["vllm_bench", "aiperf", "genai_perf", "foretoken_run"],
)
def test_a_wrong_value_anywhere_is_never_a_crash(tmp_path: Path, records: list[Any]) -> None:
    """Each value in turn is replaced by each wrong one: a run comes out, or an error says why."""
    places = [place for place in _places(records) if len(place) > 1]
    for place, wrong in product(places, _WRONG_VALUES):
        changed = copy.deepcopy(records)
        holder: Any = changed
        for key in place[:-1]:
            holder = holder[key]
        holder[place[-1]] = wrong
        path = _write(tmp_path / "measured", _lines(*changed))
        try:
            assert load_run(path).completed
        except InvalidRequestError as err:
            assert str(path) in err.message  # noqa: PT017 - both ways are right


@pytest.mark.skipif(not _RUNS.is_dir(), reason="needs the shared measurements in ../shared/data")
def test_a_run_of_llmservingsim_has_its_prompts_content() -> None:
    run = load_run(_RUNS / "rtx4090-llama8b")
    assert (300, 0, 16) == (len(run.completed), run.num_failed, run.hash_block_tokens)
    assert all(
        len(request.block_hashes) == request.num_prefill_tokens // 16 for request in run.completed
    )
    assert all(request.scheduled_s >= request.queued_s >= 0 for request in run.completed)


def _guidellm_request(start_s: float, **changes: Any) -> dict[str, Any]:
    timings = {
        "request_start": start_s,
        "first_token_iteration": start_s + 0.25,
        "last_token_iteration": start_s + 0.75,
    }
    return {"info": {"timings": timings}, "prompt_tokens": 128, "output_tokens": 11, **changes}


def _guidellm(**changes: Any) -> dict[str, Any]:
    requests = {"successful": [_guidellm_request(1001.0), _guidellm_request(1000.0)]}
    strategy = {"type_": "concurrent", "streams": 2}
    return {"requests": requests, "config": {"strategy": strategy}, **changes}


def test_a_benchmark_of_guidellm_is_read(tmp_path: Path) -> None:
    unfinished = _guidellm_request(1002.0, info={"timings": {"request_start": 1002.0}})
    requests = {**_guidellm()["requests"], "incomplete": [unfinished]}
    content = {"benchmarks": [_guidellm(requests=requests)]}
    run = load_run(_write(tmp_path / "run.json", content))
    assert ("GuideLLM", 2, 1) == (run.source, run.concurrency, run.num_failed)
    assert [(0.0, 0.25, 0.75), (1.0, 1.25, 1.75)] == [_times(one) for one in run.completed]
    assert (128, 11) == (run.completed[0].num_prefill_tokens, run.completed[0].num_decode_tokens)


def test_an_older_benchmark_of_guidellm_is_read(tmp_path: Path) -> None:
    times = {"start_time": 5.0, "first_token_time": 5.5, "last_token_time": 6.0}
    request = {**times, "prompt_tokens": 8, "output_tokens": 4}
    strategy = {"type_": "constant", "rate": 1.0}
    content = {"requests": {"successful": [request]}, "args": {"strategy": strategy}}
    run = load_run(_write(tmp_path / "run.json", {"benchmarks": [content]}))
    assert (0, (0.0, 0.5, 1.0)) == (run.concurrency, _times(run.completed[0]))


def test_a_sweep_of_guidellm_is_a_run_for_each_load(tmp_path: Path) -> None:
    """Named by its strategy; two that are alike also by their places."""
    rates = [{"type_": "constant", "rate": rate} for rate in (1.25, 2.5, 2.5)]
    strategies = [{"type_": "synchronous"}, {"type_": "concurrent", "streams": 4}, *rates]
    sweep = [_guidellm(config={"strategy": one}) for one in strategies]
    path = _write(tmp_path / "run.json", {"benchmarks": sweep})
    runs = load_runs(path)
    twice = ("constant 2.5/s, benchmarks[3]", "constant 2.5/s, benchmarks[4]")
    names = ("synchronous", "concurrent 4", "constant 1.25/s", *twice)
    assert names == tuple(run.name for run in runs)
    assert [1, 4, 0, 0, 0] == [run.concurrency for run in runs]
    assert runs[1] == load_run(path, name="concurrent 4")
    with pytest.raises(
        InvalidRequestError, match="no run 'concurrent 5'; name one of 'synchronous'"
    ):
        load_run(path, name="concurrent 5")


@pytest.mark.parametrize(
    ("benchmarks", "problem"),
    [
        ([], "holds no benchmark"),
        ([_guidellm(), _guidellm()], "holds 2 runs"),
        ([_guidellm(requests={"successful": [{"prompt_tokens": 1}]})], "no times of its first"),
        ([_guidellm(config={"strategy": {"type_": "concurrent"}})], "expected streams"),
    ],
)
def test_a_bad_benchmark_of_guidellm_says_what_is_wrong(
    tmp_path: Path, benchmarks: list[Any], problem: str
) -> None:
    with pytest.raises(InvalidRequestError, match=problem):
        load_run(_write(tmp_path / "run.json", {"benchmarks": benchmarks}))
