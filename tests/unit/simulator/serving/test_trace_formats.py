"""Each format as its owners publish it: the first rows of the files, shortened."""

from pathlib import Path

import pytest

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.requests.workload import Request
from foretoken.simulator.workload.trace import TraceContent, load_trace


def _load(folder: Path, *lines: str, hash_block_tokens: int = 0) -> TraceContent:
    path = folder / "trace"
    path.write_text("\n".join(lines), encoding="utf-8")
    return load_trace(path, hash_block_tokens=hash_block_tokens)


def _rows(content: TraceContent) -> list[tuple[float, int, int]]:
    return [(r.arrival_s, r.num_prefill_tokens, r.num_decode_tokens) for r in content.requests]


def test_azure_2023_counts_from_the_first_call_to_seven_digits(tmp_path: Path) -> None:
    content = _load(
        tmp_path,
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "2023-11-16 18:17:03.9799600,4808,10",
        "2023-11-16 18:17:04.0319601,3180,8",
        "2023-11-16 18:18:04,110,0",
    )
    assert _rows(content) == [(0.0, 4808, 10), (0.0520001, 3180, 8)]
    assert content.num_skipped == 1


def test_azure_2024_has_a_time_zone(tmp_path: Path) -> None:
    content = _load(
        tmp_path,
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "2024-05-10 00:00:00.009930+00:00,2162,5",
        "2024-05-10 00:00:01+00:00,2399,6",
        "2024-05-10 02:00:00.010930+02:00,7,7",
    )
    assert _rows(content) == [(0.0, 2162, 5), (0.99007, 2399, 6), (0.001, 7, 7)]


@pytest.mark.parametrize("time", ["", "yesterday", "2024-02-31 00:00:00", "17"])
def test_a_bad_timestamp_says_what_was_expected(tmp_path: Path, time: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"trace:2: timestamp: expected a time such as"):
        _load(tmp_path, "TIMESTAMP,ContextTokens,GeneratedTokens", f"{time},1,1")


def test_burstgpt_leaves_failures_out(tmp_path: Path) -> None:
    content = _load(
        tmp_path,
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type",
        "5,ChatGPT,472,18,490,Conversation log",
        "45,GPT-4,0,0,0,Conversation log",
        "118,GPT-4,417,0,417,API log",
        "185.5,ChatGPT,1360,647,2007,API log",
    )
    assert _rows(content) == [(5.0, 472, 18), (185.5, 1360, 647)]
    assert content.num_skipped == 2


def test_burstgpt_of_later_releases_has_sessions(tmp_path: Path) -> None:
    content = _load(
        tmp_path,
        "Timestamp,Session ID,Elapsed time,Model,"
        "Request tokens,Response tokens,Total tokens,Log Type",
        "5,abc,2.5,ChatGPT,472,18,490,Conversation log",
        "6,,1,ChatGPT,10,2,12,API log",
        "45,abc,3,ChatGPT,500,20,520,Conversation log",
    )
    assert [request.session for request in content.requests] == [1, 0, 1]


def test_mooncake_hashes_name_512_tokens(tmp_path: Path) -> None:
    content = _load(
        tmp_path,
        '{"timestamp": 0, "input_length": 1100, "output_length": 500, "hash_ids": [0, 1, 2]}',
        '{"timestamp": 3000, "input_length": 915, "output_length": 490, "hash_ids": [0, 9]}',
        '{"timestamp": 3001.5, "input_length": 20, "output_length": 1}',
    )
    assert _rows(content) == [(0.0, 1100, 500), (3.0, 915, 490), (3.0015, 20, 1)]
    assert [request.block_hashes for request in content.requests] == [(0, 1, 2), (0, 3), ()]
    assert content.hash_block_tokens == 512


def test_mooncake_turns_bring_what_is_new(tmp_path: Path) -> None:
    content = _load(
        tmp_path,
        '{"session_id": "a", "timestamp": 100, "input_length": 1100, "output_length": 50,'
        ' "hash_ids": [0, 1, 2]}',
        '{"session_id": "a", "delay": 2000, "input_length": 600, "output_length": 5,'
        ' "hash_ids": [3, 4]}',
    )
    assert content.requests[1] == Request(
        arrival_s=0.1,
        num_prefill_tokens=1100 + 50 + 600,
        num_decode_tokens=5,
        block_hashes=(0, 1),
        session=1,
        think_s=2.0,
    )


def test_more_hashes_than_blocks_ask_for_the_block_size(tmp_path: Path) -> None:
    line = '{"timestamp": 0, "input_length": 40, "output_length": 5, "hash_ids": [0, 1, 2]}'
    with pytest.raises(InvalidRequestError, match=r"trace:1: 3 block hashes, but 40 tokens are 1"):
        _load(tmp_path, line)
    assert _load(tmp_path, line, hash_block_tokens=16).hash_block_tokens == 16


def test_bailian_counts_seconds_and_blocks_of_16(tmp_path: Path) -> None:
    content = _load(
        tmp_path,
        '{"chat_id": 159, "parent_chat_id": -1, "timestamp": 61.114, "input_length": 33,'
        ' "output_length": 132, "type": "text", "turn": 1, "hash_ids": [77, 9, 12345678901234567]}',
    )
    assert _rows(content) == [(61.114, 33, 132)]
    assert content.requests[0].block_hashes == (0, 1, 2)
    assert content.hash_block_tokens == 16


def test_llmservingsim_tokens_name_blocks_with_all_before_them(tmp_path: Path) -> None:
    first, second = list(range(16)), list(range(16, 32))
    content = _load(
        tmp_path,
        f'{{"input_toks": 33, "output_toks": 5, "arrival_time_ns": 46926808,'
        f' "input_tok_ids": {[*first, *second, 1]}, "output_tok_ids": []}}',
        f'{{"input_toks": 32, "output_toks": 5, "arrival_time_ns": 50000000,'
        f' "input_tok_ids": {[*first, *first]}}}',
        f'{{"input_toks": 32, "output_toks": 5, "arrival_time_ns": 60000000,'
        f' "input_tok_ids": {[*second, *second]}}}',
    )
    assert content.requests[0].arrival_s == 0.046926808
    assert [request.block_hashes for request in content.requests] == [(0, 1), (0, 2), (3, 4)]
    assert content.hash_block_tokens == 16


def test_llmservingsim_tokens_are_as_many_as_said(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"trace:1: input_tok_ids: expected a list of 3"):
        _load(
            tmp_path,
            '{"input_toks": 3, "output_toks": 5, "arrival_time_ns": 0, "input_tok_ids": [1, 2]}',
        )


def test_the_vllm_runs_name_their_blocks(shared_data: Path) -> None:
    path = shared_data / "llmservingsim" / "runs" / "rtx4090-llama8b" / "workload.jsonl"
    content = load_trace(path)
    assert content.hash_block_tokens == 16
    assert _rows(content)[0] == (0.046926808, 2358, 531)
    assert {len(r.block_hashes) - r.num_prefill_tokens // 16 for r in content.requests} == {0}
    shared = {name for r in content.requests for name in r.block_hashes}
    assert len(shared) < sum(len(r.block_hashes) for r in content.requests)


def test_any_table_goes_by_many_names(tmp_path: Path) -> None:
    content = _load(
        tmp_path,
        "timestamp_ms,isl,osl,session_id,think_s,slo_class,block_hashes_16",
        "500,40,3,x,,gold,a b c",
        ",50,4,x,1.5,,a;b;d",
        "700,16,1,,,,[a]",
    )
    assert content.requests == (
        Request(
            arrival_s=0.5,
            num_prefill_tokens=40,
            num_decode_tokens=3,
            block_hashes=(0, 1, 2),
            session=1,
            slo_class="gold",
        ),
        Request(
            arrival_s=0.0,
            num_prefill_tokens=50,
            num_decode_tokens=4,
            block_hashes=(0, 1, 3),
            session=1,
            think_s=1.5,
        ),
        Request(arrival_s=0.7, num_prefill_tokens=16, num_decode_tokens=1, block_hashes=(0,)),
    )
    assert content.hash_block_tokens == 16


def test_objects_are_a_table_too(tmp_path: Path) -> None:
    content = _load(
        tmp_path,
        '{"arrival_s": 1, "prompt_tokens": 40, "completion_tokens": 3, "hash_ids_32": ["x", "y"]}',
        '{"arrival_s": 2, "prompt_tokens": 40, "completion_tokens": 3, "session": 0}',
    )
    assert [request.block_hashes for request in content.requests] == [(0, 1), ()]
    assert [request.session for request in content.requests] == [0, 0]
    assert content.hash_block_tokens == 32


@pytest.mark.parametrize(
    "times",
    [("1700000000.25", "1700000001.5"), ("2023-11-14T22:13:20.25Z", "2023-11-14 22:13:21.5")],
)
def test_times_of_this_century_count_from_the_first(tmp_path: Path, times: tuple[str, str]) -> None:
    header = "timestamp,input_tokens,output_tokens"
    content = _load(tmp_path, header, *(f"{time},1,1" for time in times))
    assert [r.arrival_s for r in content.requests] == pytest.approx([0.0, 1.25], abs=1e-6)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["arrival_s,isl,osl,hash_ids", "0,1,1,a"], r"trace:1: hash_ids: hash_block_tokens must"),
        (["arrival_s,isl,osl,hash_ids_16", "0,1,1,a b"], r"trace:2: 2 block hashes, but 1 tokens"),
        (["arrival_s,isl,osl,session_id", ",1,1,a"], r"trace:2: arrival_s: expected a number"),
        (["arrival_s,isl,osl,think_s", "0,1,1,-1"], r"trace:2: think_s: expected a time"),
        (['{"arrival_s": 0, "isl": true, "osl": 1}'], r"trace:1: isl: expected a number, found T"),
        (['{"arrival_s": 0, "isl": null, "osl": 1}'], r"trace:1: isl: expected a number, found N"),
        (
            ['{"arrival_s": 0, "isl": 1, "osl": 1, "hash_ids_16": [0.5]}'],
            r"trace:1: hash_ids_16: expected a list of block hashes",
        ),
        (
            ['{"arrival_s": 0, "isl": 1, "osl": 1, "session": [1]}'],
            r"trace:1: session: expected a name or number",
        ),
    ],
)
def test_bad_rows_of_a_table_are_named(tmp_path: Path, lines: list[str], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        _load(tmp_path, *lines)


def test_numbers_may_have_an_exponent(tmp_path: Path) -> None:
    content = _load(tmp_path, "arrival_s,input_tokens,output_tokens", "5e-05,7,3", "1E-4,8,4")
    assert _rows(content) == [(5e-05, 7, 3), (1e-4, 8, 4)]


def test_a_table_with_the_columns_of_vidur_may_have_sessions(tmp_path: Path) -> None:
    """Nothing that is known of requests is left out because the columns have one tool's names."""
    content = _load(
        tmp_path,
        "arrived_at,num_prefill_tokens,num_decode_tokens,session,think_s,slo_class",
        "0.5,7,3,a,,chat",
        "0.5,18,3,a,2.5,",
    )
    first, second = content.requests
    assert ((1, "chat"), (1, 2.5)) == (
        (first.session, first.slo_class),
        (second.session, second.think_s),
    )


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (
            '{"timestamp": 0, "input_length": 5, "output_length": 1, "session_id": [1]}',
            r"trace:1: session_id: expected a name or number, found \[1\]",
        ),
        (
            '{"input_toks": 1, "output_toks": 1, "arrival_time_ns": 0, "input_tok_ids": [[1]]}',
            r"trace:1: input_tok_ids: expected whole numbers",
        ),
    ],
)
def test_names_of_the_wrong_type_are_said(tmp_path: Path, line: str, problem: str) -> None:
    with pytest.raises(InvalidRequestError, match=problem):
        _load(tmp_path, line)


def test_a_generic_trace_names_the_requests_that_each_waits_for(tmp_path: Path) -> None:
    content = _load(
        tmp_path,
        "arrival_s,input_tokens,output_tokens,request_id,after",
        "1.5,100,10,plan,",
        ",200,20,left,plan",
        ",300,30,right,plan",
        ",400,40,,left right",
    )
    assert [(), (0,), (0,), (1, 2)] == [request.after for request in content.requests]
    assert [1.5, 0.0, 0.0, 0.0] == [request.arrival_s for request in content.requests]


def test_a_generic_trace_waits_for_earlier_rows_alone(tmp_path: Path) -> None:
    with pytest.raises(
        InvalidRequestError, match="trace:2: depends_on: no earlier row has the request_id 7"
    ):
        _load(
            tmp_path,
            '{"arrival_s": 0, "isl": 9, "osl": 3, "id": 6}',
            '{"isl": 9, "osl": 3, "id": 7, "depends_on": [6, 7]}',
        )
