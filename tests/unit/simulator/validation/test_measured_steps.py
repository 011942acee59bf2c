"""Step records of engines, read from lines as the engines write them."""

import json
from pathlib import Path

import pytest

from foretoken.domain.errors import InvalidRequestError
from foretoken.simulator.validation.measured_steps import EngineStep, load_steps

_SGLANG = """\
[2025-06-08 21:06:35 TP0] Prefill batch. #new-seq: 1, #new-token: 2048, #cached-token: 1, token \
usage: 0.00, #running-req: 0, #queue-req: 1
2025-06-08 21:06:35,733 - INFO - flashinfer.jit: Loading JIT ops: cascade
[2025-06-08 21:06:36 TP0] Prefill batch [7], #new-seq: 2, #new-token: 2048, #cached-token: 512, \
token usage: 0.01, #running-req: 0, #queue-req: 0, cuda graph: False, input throughput (token/s): \
10240.00
[2025-06-08 21:06:36 TP0] Decode batch. #running-req: 4, #token: 4100, token usage: 0.00, cuda \
graph: True, gen throughput (token/s): 0.88, #queue-req: 0
[2025-06-08 21:06:36 TP0] Decode batch. #running-req: 4, #token: 4260, token usage: 0.00, cuda \
graph: True, gen throughput (token/s): 400.00, #queue-req: 0,
[2025-06-08 21:06:37 TP0] Decode batch. #running-req: 3, #token: 3300, token usage: 0.00, cuda \
graph: True, gen throughput (token/s): 122.53, #queue-req: 0,
[2025-06-08 21:06:37 TP0] Decode batch. #running-req: 3, #token: 3420, token usage: 0.00, accept \
len: 2.70, cuda graph: True, gen throughput (token/s): 122.53, #queue-req: 0,
"""


def _metrics(wall_time: float, **scheduled: float) -> dict[str, object]:
    return {"version": 1, "worker_id": "w", "wall_time": wall_time, "scheduled_requests": scheduled}


def _write(folder: Path, lines: list[dict[str, object]]) -> Path:
    path = folder / "fpm.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def test_forward_pass_metrics_are_read_as_the_receiver_writes_them(tmp_path: Path) -> None:
    decode = _metrics(
        0.01, num_decode_requests=4, sum_decode_kv_tokens=4000, var_decode_kv_tokens=30000.0
    )
    mixed = _metrics(
        0.03,
        num_prefill_requests=1,
        sum_prefill_tokens=512,
        sum_prefill_kv_tokens=1024,
        num_decode_requests=1,
        sum_decode_kv_tokens=900,
    )
    lines = [{"received_at_ns": 1, "metrics": decode}, mixed, _metrics(0.0)]
    run = load_steps(_write(tmp_path, lines))
    assert ["decode", "mixed"] == [step.kind for step in run.steps]
    assert (
        EngineStep(duration_s=0.01, num_decodes=4, decode_kv_tokens=4000, decode_kv_tokens_max=1300)
        == (run.steps[0])
    )
    assert (513, 1024, 900) == (
        run.steps[1].num_tokens,
        run.steps[1].prefill_kv_tokens,
        run.steps[1].decode_kv_tokens_max,
    )


def test_fields_next_to_the_time_are_those_of_the_requests(tmp_path: Path) -> None:
    flat = {"wall_time": 0.2, "num_prefill_requests": 2, "sum_prefill_tokens": 4096}
    (step,) = load_steps(_write(tmp_path, [flat])).steps
    assert ("prefill", 4096, 0.2) == (step.kind, step.num_tokens, step.duration_s)


def test_a_line_of_sglang_counts_where_nothing_else_ran_since_the_one_before(
    tmp_path: Path,
) -> None:
    path = tmp_path / "server.log"
    path.write_text(_SGLANG, encoding="utf-8")
    prefill, decode = load_steps(path).steps
    assert EngineStep(
        duration_s=0.2, num_prefills=2, prefill_tokens=2048, prefill_kv_tokens=512
    ) == (prefill)
    assert EngineStep(
        duration_s=0.01, num_decodes=4, decode_kv_tokens=4180, decode_kv_tokens_max=1045
    ) == (decode)


def test_what_tells_no_step_is_refused_with_its_reason(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    for text, reason in (
        ("", "is empty"),
        ("INFO: started\n", "in no format of step records"),
        (_SGLANG.splitlines()[0], "tells the time of no step"),
        ('{"version": 2, "wall_time": 1}', "of version 2; 1 is known"),
        ('{"wall_time": "long"}', "expected a time in s"),
    ):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(InvalidRequestError, match=reason):
            load_steps(path)
