"""What holds for every pipeline schedule, whatever the numbers and the times."""

from collections import Counter
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretoken.domain.results.training_report import SPAN_KINDS
from foretoken.simulator.steps.pipelines.events import (
    ChunkTimes,
    LinkRules,
    PipelineRun,
    run_pipeline,
)
from foretoken.simulator.steps.pipelines.formulas import (
    PipelineShape,
    bound_pipeline_us,
    bound_work_us,
)
from foretoken.simulator.steps.pipelines.schedule import RankOrder, all_schedules, find_schedule

_TINY = 1e-9


@dataclass(frozen=True, slots=True)
class _Case:
    """A schedule with numbers that suit it."""

    schedule: str
    num_ranks: int
    num_micro_batches: int
    virtual_stages: int

    @property
    def orders(self) -> tuple[RankOrder, ...]:
        schedule = find_schedule(self.schedule)
        return schedule.orders(self.num_ranks, self.num_micro_batches, self.virtual_stages)

    @property
    def num_chunks(self) -> int:
        return self.num_ranks * self.virtual_stages

    def run(self, times: list[ChunkTimes], rules: LinkRules) -> PipelineRun:
        return run_pipeline(self.orders, times, rules)

    def step_us(self, times: list[ChunkTimes], rules: LinkRules) -> float:
        return float(max(self.run(times, rules).rank_ends_us))

    def bound_us(self, times: list[ChunkTimes], rules: LinkRules) -> Any:
        return bound_pipeline_us(self.schedule, self.shape(times, rules))

    def shape(self, times: list[ChunkTimes], rules: LinkRules) -> PipelineShape:
        return PipelineShape(
            chunk_times=times,
            num_ranks=self.num_ranks,
            num_micro_batches=self.num_micro_batches,
            rules=rules,
        )


@st.composite
def _cases(draw: st.DrawFn, names: tuple[str, ...] = tuple(sorted(all_schedules()))) -> _Case:
    name = draw(st.sampled_from(names))
    num_ranks, num_micro_batches = draw(st.integers(1, 6)), draw(st.integers(1, 12))
    virtual_stages = find_schedule(name).virtual_stages or draw(st.integers(1, 3))
    if name == "interleaved":
        num_micro_batches = num_ranks * draw(st.integers(1, 4))
    elif name == "dualpipe":
        num_ranks = 2 * draw(st.integers(1, 4))
        num_micro_batches = 2 * num_ranks + 2 * draw(st.integers(0, 6))
    return _Case(name, num_ranks, num_micro_batches, virtual_stages)


_pass_us = st.floats(1.0, 20.0)
_send_us = st.one_of(st.just(0.0), st.floats(0.01, 5.0))
_rules = st.builds(
    LinkRules, transfers=st.sampled_from(["rendezvous", "buffered"]), has_duplex_links=st.booleans()
)


@st.composite
def _uneven_times(draw: st.DrawFn, num_chunks: int) -> list[ChunkTimes]:
    """Return chunks of their own times; a pass and its mirror image's may save time together."""
    times = []
    for _ in range(num_chunks):
        forward_us, input_us, weight_us = (draw(_pass_us) for _ in range(3))
        backward_us = input_us + weight_us
        times.append(
            ChunkTimes(
                forward_us=forward_us,
                backward_input_us=input_us,
                backward_weight_us=weight_us,
                send_forward_us=draw(_send_us),
                send_backward_us=draw(_send_us),
                first_backward_us=backward_us - draw(st.floats(0.0, 0.3)) * weight_us,
                last_backward_us=backward_us + draw(st.floats(0.0, 0.3)) * weight_us,
            )
        )
    return _paired(times, draw(st.none() | st.floats(0.6, 1.0)))


def _paired(times: list[ChunkTimes], ratio: float | None) -> list[ChunkTimes]:
    """Return chunks whose forward pass and a mirrored backward pass take `ratio` of their sum."""
    if ratio is None:
        return times
    return [
        replace(
            ahead,
            overlapped_us={
                ("backward", back): ratio * (ahead.forward_us + times[back].backward_us)
            },
        )
        for ahead, back in zip(times, reversed(range(len(times))), strict=True)
    ]


@given(_cases())
def test_every_pass_is_there_once(case: _Case) -> None:
    """Of every micro batch on every chunk a forward pass, and a backward one or its halves."""
    counts = Counter(item for order in case.orders for slot in order for item in slot)
    assert {1} == set(counts.values())
    kinds: dict[tuple[int, int], set[str]] = {}
    for item in counts:
        kinds.setdefault((item.micro_batch, item.chunk), set()).add(item.kind)
    expected = {(i, c) for i in range(case.num_micro_batches) for c in range(case.num_chunks)}
    assert expected == set(kinds)
    assert all(
        found in ({"forward", "backward"}, {"forward", "backward_input", "backward_weight"})
        for found in kinds.values()
    )
    splits = any("backward_weight" in found for found in kinds.values())
    assert splits == find_schedule(case.schedule).splits_backward


@given(st.data(), _cases(), _rules)
def test_no_pass_begins_before_what_it_needs(
    data: st.DataObject, case: _Case, rules: LinkRules
) -> None:
    """Forward before backward, chunk by chunk, transfers in between; so nothing hangs either."""
    spans = case.run(data.draw(_uneven_times(case.num_chunks)), rules).spans
    starts: dict[tuple[str, int, int], float] = {}
    ends: dict[tuple[str, int, int], float] = {}
    for kind, micro_batch, chunk, start, end in zip(
        spans.kind, spans.micro_batch, spans.chunk, spans.start_us, spans.end_us, strict=True
    ):
        name = SPAN_KINDS[kind].replace("backward_input", "backward")
        starts[name, int(micro_batch), int(chunk)] = float(start)
        ends[name, int(micro_batch), int(chunk)] = float(end)
    for (name, micro_batch, chunk), start in starts.items():
        is_last = chunk == case.num_chunks - 1
        needs = {
            "forward": ("send_forward", "forward", chunk - 1),
            "backward": (
                ("", "forward", chunk) if is_last else ("send_backward", "backward", chunk + 1)
            ),
            "backward_weight": ("", "backward", chunk),
            "send_forward": ("", "forward", chunk),
            "send_backward": ("", "backward", chunk),
        }
        sent, made, before = needs[name]
        for needed in ((sent, micro_batch, before), (made, micro_batch, before)):
            assert ends.get(needed, 0.0) <= start + _TINY


@given(st.data(), _cases(), _rules)
def test_a_rank_does_one_slot_at_a_time_and_is_busy_or_held_or_waits(
    data: st.DataObject, case: _Case, rules: LinkRules
) -> None:
    run = case.run(data.draw(_uneven_times(case.num_chunks)), rules)
    spans = run.spans
    for rank, order in enumerate(case.orders):
        is_pass = (spans.stage == rank) & (spans.kind < SPAN_KINDS.index("send_forward"))
        slots = sorted(set(zip(spans.start_us[is_pass], spans.end_us[is_pass], strict=True)))
        assert len(order) == len(slots)
        assert all(first[1] <= second[0] + _TINY for first, second in pairwise(slots))
        used_us = float(run.busy_us[rank] + run.transfers_us[rank])
        assert used_us <= float(run.rank_ends_us[rank]) * (1 + _TINY)


@given(st.data(), _cases(), _rules)
def test_a_step_takes_no_less_than_the_formula(
    data: st.DataObject, case: _Case, rules: LinkRules
) -> None:
    """Searches discard by it."""
    times = data.draw(_uneven_times(case.num_chunks))
    step_us = case.step_us(times, rules) * (1 + _TINY)
    assert case.bound_us(times, rules) <= step_us
    # What a schedule without a formula is bounded by.
    assert bound_work_us(find_schedule(case.schedule), case.shape(times, rules)) <= step_us


@given(st.data(), _cases(), _rules)
def test_a_step_takes_no_less_than_one_micro_batch_and_the_busiest_rank(
    data: st.DataObject, case: _Case, rules: LinkRules
) -> None:
    times = [replace(t, overlapped_us={}) for t in data.draw(_uneven_times(case.num_chunks))]
    way_us = sum(float(t.forward_us + t.backward_input_us) for t in times)
    run = case.run(times, rules)
    longest_us = max(way_us, *map(float, run.busy_us), 0.0)
    assert longest_us <= float(max(run.rank_ends_us)) * (1 + _TINY)


@given(st.data(), _cases(), _rules)
def test_more_micro_batches_are_never_faster(
    data: st.DataObject, case: _Case, rules: LinkRules
) -> None:
    times = data.draw(_uneven_times(case.num_chunks))
    more = {"interleaved": case.num_ranks, "dualpipe": 2}.get(case.schedule, 1)
    larger = replace(case, num_micro_batches=case.num_micro_batches + more)
    assert case.step_us(times, rules) <= larger.step_us(times, rules) * (1 + _TINY)


@given(st.data(), _cases())
def test_buffered_transfers_are_never_slower(data: st.DataObject, case: _Case) -> None:
    times = data.draw(_uneven_times(case.num_chunks))
    held, free = (
        case.step_us(times, LinkRules(transfers=name)) for name in ("rendezvous", "buffered")
    )
    assert free <= held * (1 + _TINY)


@given(st.data(), _cases(), st.sampled_from(["rendezvous", "buffered"]))
def test_columns_give_what_single_runs_give(
    data: st.DataObject, case: _Case, transfers: str
) -> None:
    samples = [
        [replace(t, overlapped_us={}) for t in data.draw(_uneven_times(case.num_chunks))]
        for _ in range(3)
    ]
    names = (
        *("forward_us", "backward_input_us", "backward_weight_us"),
        *("send_forward_us", "send_backward_us"),
        *("first_backward_us", "last_backward_us"),
    )
    columns = [
        ChunkTimes(**{name: np.array([getattr(t, name) for t in chunk]) for name in names})
        for chunk in zip(*samples, strict=True)
    ]
    rules = LinkRules(transfers=transfers)
    run, bounds = case.run(columns, rules), case.bound_us(columns, rules)
    for index, times in enumerate(samples):
        single = case.run(times, rules)
        ends = [np.asarray(end)[index] for end in run.rank_ends_us]
        assert pytest.approx(single.rank_ends_us) == ends
        assert pytest.approx(case.bound_us(times, rules)) == bounds[index]


# --- chunks that all take the same, transfers that take nothing -----------------------------------


def _even_times(num_chunks: int, forward_us: float, input_us: float, weight_us: float) -> Any:
    times = ChunkTimes(
        forward_us=forward_us, backward_input_us=input_us, backward_weight_us=weight_us
    )
    return [times] * num_chunks


@given(_cases(), _pass_us)
def test_a_rendezvous_costs_nothing_where_all_passes_take_the_same(
    case: _Case, time_us: float
) -> None:
    """Receivers are there when an input is made."""
    times = _even_times(case.num_chunks, time_us, time_us, time_us)
    held, free = (
        case.step_us(times, LinkRules(transfers=name)) for name in ("rendezvous", "buffered")
    )
    assert pytest.approx(free) == held


@given(_cases(("gpipe", "one_f_one_b", "interleaved")), _pass_us, _pass_us)
def test_the_bubble_of_whole_backward_passes_is_the_known_one(
    case: _Case, forward_us: float, backward_us: float
) -> None:
    """(m v + p - 1) (f + b) of a chunk. Source: GPipe; PipeDream; Narayanan 2021, section 2.2."""
    times = _even_times(case.num_chunks, forward_us, backward_us, 0.0)
    rules = LinkRules(transfers="buffered")
    num_passes = case.num_micro_batches * case.virtual_stages + case.num_ranks - 1
    expected_us = num_passes * (forward_us + backward_us)
    assert pytest.approx(expected_us) == case.step_us(times, rules)
    assert pytest.approx(expected_us) == case.bound_us(times, rules)
    if case.schedule != "interleaved":
        assert pytest.approx(expected_us) == case.step_us(times, LinkRules())


@given(_cases(("zero_bubble_h1",)), _pass_us, _pass_us, st.floats(0.1, 1.0))
def test_the_bubble_of_zero_bubble_h1_is_the_known_one(
    case: _Case, forward_us: float, input_us: float, share: float
) -> None:
    """(p - 1) (f + b - w) where weight halves take the shortest. Source: Qi 2023, section 2.3."""
    weight_us = share * min(forward_us, input_us)
    case = replace(case, num_micro_batches=case.num_micro_batches + case.num_ranks)
    times = _even_times(case.num_chunks, forward_us, input_us, weight_us)
    rules = LinkRules(transfers="buffered")
    busy_us = case.num_micro_batches * (forward_us + input_us + weight_us)
    expected_us = busy_us + (case.num_ranks - 1) * (forward_us + input_us - weight_us)
    assert pytest.approx(expected_us) == case.step_us(times, rules)
    assert pytest.approx(expected_us) == case.bound_us(times, rules)


@given(_cases(("zero_bubble_v",)), _pass_us)
def test_zero_bubble_v_has_nearly_no_bubble_when_halves_take_the_same(
    case: _Case, time_us: float
) -> None:
    """A pass of a chunk for every rank, where 1F1B idles for six. Source: Qi 2024 has nearly none.

    The way to the last rank is one less.
    """
    case = replace(case, num_micro_batches=case.num_micro_batches + 2 * case.num_ranks)
    times = _even_times(case.num_chunks, time_us, time_us, time_us)
    num_idle = case.num_ranks if case.num_ranks > 1 else 0
    expected_us = (6 * case.num_micro_batches + num_idle) * time_us
    assert pytest.approx(expected_us) == case.step_us(times, LinkRules(transfers="buffered"))


@given(_cases(("dualpipe",)), _pass_us, st.floats(2.0, 3.0))
def test_the_bubble_of_dualpipe_is_the_known_one(case: _Case, time_us: float, ratio: float) -> None:
    """(p/2 - 1) (F&B + B - 3W) where passes take the same. Source: DeepSeek-V3, table 2."""
    pair_us = ratio * time_us
    even = _even_times(case.num_chunks, time_us, time_us, time_us)
    times = _paired(even, pair_us / (3 * time_us))
    rules = LinkRules(transfers="buffered")
    run = case.run(times, rules)
    bubble_us = (case.num_ranks // 2 - 1) * (pair_us + 2 * time_us - 3 * time_us)
    middle = case.num_ranks // 2 - 1
    expected_us = float(run.busy_us[middle]) + bubble_us
    assert pytest.approx(expected_us) == float(max(run.rank_ends_us))
    assert pytest.approx(expected_us) == case.bound_us(times, rules)


@given(_cases(("one_f_one_b",)), _pass_us, st.lists(st.floats(0.9, 1.1), min_size=12, max_size=12))
def test_the_formula_of_one_f_one_b_is_close_for_uneven_stages(
    case: _Case, forward_us: float, factors: list[float]
) -> None:
    """Stages within 10 % of each other: within 3 %."""
    times = [
        ChunkTimes(
            forward_us=forward_us * factors[2 * chunk],
            backward_input_us=2 * forward_us * factors[2 * chunk + 1],
        )
        for chunk in range(case.num_chunks)
    ]
    for rules in (LinkRules(), LinkRules(transfers="buffered")):
        assert pytest.approx(case.step_us(times, rules), rel=0.03) == case.bound_us(times, rules)
