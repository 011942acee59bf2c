"""What every scheduler computes, step by step: a table of runs, besides the laws."""

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from golden_table import check_golden
from scheduler_steps import SchedulerRun, SchedulerStep

from foretoken.domain.frameworks.engine import find_engine

# Of each engine the tokens its cache has room for under pressure, and rules that some runs have.
_ENGINES: dict[str, tuple[int, dict[str, Any]]] = {
    "faster-transformer": (416, {}),
    "lightllm": (420, {"max_decode_run": 3}),
    "orca": (416, {}),
    "plain": (416, {}),
    "sarathi": (416, {}),
    "sglang-0.5": (420, {}),
    "sglang-0.5 mixed": (420, {"mixes_prefill": True}),
    "trtllm-1.0": (288, {}),
    "trtllm-1.0 in pieces": (288, {"max_chunk_tokens": 32}),
    "vllm-0.19": (416, {}),
    "vllm-v0": (416, {}),
    "vllm-v0 swapping": (416, {"preemption": "swap"}),
    "vllm-v0 padded": (416, {"counts_padding": True}),
}
# Requests (prompt, answer) by the step before which they arrive.
_SCRIPTS: dict[str, tuple[dict[int, list[tuple[int, int]]], dict[str, Any]]] = {
    "room": ({0: [(20, 5), (33, 4)], 2: [(7, 6)], 5: [(64, 3), (1, 1)]}, {"num_tokens": 32_000}),
    "pressure": ({0: [(90, 60), (70, 80), (50, 40)], 4: [(60, 30)], 9: [(120, 20), (16, 50)]}, {}),
    "pieces": (
        {0: [(150, 4), (40, 6)], 1: [(100, 2)], 3: [(90, 3)], 6: [(33, 9), (31, 2)]},
        {"num_tokens": 32_000, "max_num_batched_tokens": 160},
    ),
    "seats": (
        {0: [(10, 4), (12, 9), (14, 2), (9, 3)], 3: [(8, 8)]},
        {"num_tokens": 32_000, "max_num_seqs": 2},
    ),
    "taken back": ({0: [(30, 150)], 1: [(30, 150), (10, 280)]}, {"num_tokens": 352}),
    "a long queue": ({0: [(16 * (1 + i % 4), 5 + 7 * i % 40) for i in range(12)]}, {}),
}


def test_every_step_of_every_scheduler_is_as_kept() -> None:
    """Tokens of prompts, requests that decode, requests that lose their blocks; `*n`: n steps."""
    rows = []
    for engine, (num_tokens, rules) in _ENGINES.items():
        for script, (arrivals, limits) in _SCRIPTS.items():
            given = {"num_tokens": num_tokens, **rules, **limits}
            steps = _play(engine.partition(" ")[0], arrivals, given)
            text = "; ".join(_collapse(map(_describe, steps)))
            rows.append({"engine": engine, "script": script, "steps": text})
    check_golden("schedulers", rows)


def _play(
    profile: str, arrivals: dict[int, list[tuple[int, int]]], given: dict[str, Any]
) -> list[SchedulerStep]:
    num_blocks = given.pop("num_tokens") // find_engine(profile).block_size
    run = SchedulerRun(profile, [], num_blocks, **given)
    for step in range(max(arrivals) + 1):
        for prompt, answer in arrivals.get(step, []):
            run.arrive(prompt, answer)
        run.step()
    return run.run()


def _describe(step: SchedulerStep) -> str:
    parts = [f"p{index}:{num_tokens}" for index, num_tokens in step.prompts.items()]
    parts += ["d" + ",".join(map(str, sorted(step.decodes)))] * bool(step.decodes)
    parts += [f"x{index}" for index in step.preempted]
    return " ".join(parts) or "-"


def _collapse(texts: Iterator[str]) -> Iterator[str]:
    for text, alike in groupby(texts):
        count = len(list(alike))
        yield f"{text} *{count}" if count > 1 else text
