"""Every scheduler's compiled twin does what its reference does, to the last ns, on any workload."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from serving_strategies import Case, cases

from foretoken.simulator.serving.fast.selection import SELECTS
from foretoken.simulator.serving.record import ServingRecord

_OWN_RULES = sorted(SELECTS.keys() - {"chunked_prefill"})


@st.composite
def _cases_of(draw: st.DrawFn, scheduler: str) -> Case:
    """Draw a case with the rules that only some schedulers know."""
    case = draw(cases(scheduler))
    profile = replace(
        case.setup.profile,
        counts_padding=draw(st.booleans()),
        max_decode_run=draw(st.sampled_from((0, 1, 3, 10))),
        mixes_prefill=draw(st.booleans()),
    )
    return replace(case, setup=replace(case.setup, profile=profile))


@pytest.mark.parametrize("scheduler", _OWN_RULES)
def test_twins_agree(scheduler: str) -> None:
    """When each request was seen, scheduled and done, and what every step held, are equal."""

    @given(case=_cases_of(scheduler))
    def compare(case: Case) -> None:
        reference, fast = (case.run(uses_fast_path=is_fast) for is_fast in (False, True))
        assert _columns(reference) == _columns(fast)

    compare()


def _columns(record: ServingRecord) -> dict[str, list[int]]:
    requests, tokens = record.requests, record.tokens
    columns = {
        "outcome": requests.outcome,
        "scheduled": requests.scheduled_ns,
        "first token": requests.first_token_ns,
        "finished": requests.finished_ns,
        "preemptions": requests.num_preemptions,
        "cached": requests.num_cached_tokens,
        "runs": np.stack([tokens.request, tokens.first_step, tokens.stride, tokens.count]),
    }
    for engine, steps in enumerate(record.steps):
        columns[f"times of {engine}"] = np.stack([steps.scheduled_ns, steps.end_ns])
        columns[f"work of {engine}"] = np.stack(
            [steps.num_tokens, steps.num_decodes, steps.num_rows, steps.num_used_blocks]
        )
        columns[f"queues of {engine}"] = np.stack([steps.num_running, steps.num_waiting])
        columns[f"prefills of {engine}"] = np.stack(
            [steps.prefill_step, steps.prefill_tokens, steps.prefill_context]
        )
    return {name: column.tolist() for name, column in columns.items()}
