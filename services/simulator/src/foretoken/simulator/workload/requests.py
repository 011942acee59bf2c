"""Turn a workload specification into a plan of requests."""

from collections.abc import Sequence

import numpy as np

from foretoken.domain.errors import InvalidRequestError, UnknownPluginError
from foretoken.domain.plugins import scan_modules
from foretoken.domain.requests.slo import SloClass
from foretoken.domain.requests.workload import WorkloadSpec
from foretoken.simulator.workload.request_draft import (
    ArrivalProcess,
    Floats,
    RequestDraft,
    fill_rows,
    find_previous_turns,
)
from foretoken.simulator.workload.request_plan import NONE, Ints, RequestPlan
from foretoken.simulator.workload.rng import named_stream

_NS_PER_S = 1e9

# Half of what an int64 of ns can hold, 146 years: the other half is for the simulation.
_MAX_S = 2**62 / _NS_PER_S

# One token of prompt and one of answer.
_MIN_TOKENS = 2


def resolve_workload(spec: WorkloadSpec, slo_classes: Sequence[SloClass], seed: int) -> RequestPlan:
    """Return the requests of a workload in order of arrival, cut to its token limit.

    The same seed gives the same plan; what one part of the workload draws does not depend on what
    the others are.

    Raises:
        UnknownPluginError: no arrival process of that name.
        InvalidRequestError: lengths, options, classes or the trace cannot be used.

    """
    if spec.max_tokens_per_request and spec.max_tokens_per_request < _MIN_TOKENS:
        raise InvalidRequestError.of_field(
            "workload.max_tokens_per_request", f"must be at least {_MIN_TOKENS}, or 0 for no limit"
        )
    processes = scan_modules("foretoken.simulator.workload.arrivals", "ARRIVAL")
    process: ArrivalProcess = UnknownPluginError.look_up(spec.arrival, processes)
    draft = process(spec, seed)
    classes = _assign_classes(draft, slo_classes, seed)
    rows = _select_rows(spec, draft.arrival_s)
    return _build_plan(spec, draft, rows, _rank_classes(classes[rows], slo_classes))


def _select_rows(spec: WorkloadSpec, arrival_s: Floats) -> Ints:
    """Return the requests of the window, by arrival, no more than asked for."""
    is_inside = arrival_s >= spec.window_start_s
    if spec.window_end_s:
        is_inside &= arrival_s < spec.window_end_s
    rows = np.flatnonzero(is_inside)
    if len(rows) == 0:
        raise InvalidRequestError.of_field(
            "workload.window_start_s",
            f"no request arrives in the window; the first one arrives at {arrival_s.min():g} s, the"
            f" last one arrives at {arrival_s.max():g} s",
        )
    rows = rows[np.argsort(arrival_s[rows], kind="stable")]
    return rows[: spec.max_num_requests or None]


def _build_plan(
    spec: WorkloadSpec,
    draft: RequestDraft,
    rows: Ints,
    ranked_classes: tuple[Ints, Ints],
) -> RequestPlan:
    prompts, answers = _cut_lengths(
        draft.num_prefill_tokens[rows], draft.num_decode_tokens[rows], spec.max_tokens_per_request
    )
    follows = find_previous_turns(draft.session[rows])
    arrival_s = (
        _place_ramp(follows, draft.concurrency, draft.ramp_s)
        if draft.concurrency
        else draft.arrival_s[rows] - spec.window_start_s
    )
    hash_offsets, hashes = _take_hashes(draft, rows, prompts, answers)
    slo_class, priority = ranked_classes
    return RequestPlan(
        arrival_ns=_to_ns(arrival_s * spec.time_scale),
        num_prefill_tokens=prompts,
        num_decode_tokens=answers,
        follows=follows,
        think_ns=_to_ns(np.where(follows == NONE, 0.0, draft.think_s[rows])),
        slo_class=slo_class,
        priority=priority,
        stream=draft.stream[rows],
        prefix_stream=draft.prefix_stream[rows],
        prefix_tokens=np.minimum(draft.prefix_tokens[rows], prompts),
        hash_offsets=hash_offsets,
        hashes=hashes,
        hash_block_tokens=draft.hash_block_tokens,
        concurrency=draft.concurrency,
    )


def _place_ramp(follows: Ints, concurrency: int, ramp_s: float) -> Floats:
    """Return when requests of a closed loop may arrive: the first ones evenly over the ramp."""
    rank = np.cumsum(follows == NONE) - 1
    # The rest carry the time of the last of the ramp: before it they cannot arrive.
    times_s: Floats = np.minimum(rank, concurrency - 1) * (ramp_s / concurrency)
    return times_s


def _cut_lengths(prompts: Ints, answers: Ints, max_tokens: int) -> tuple[Ints, Ints]:
    if max_tokens == 0:
        return prompts, answers
    # The prompt gives way first: the answer is what the user waits for.
    excess = np.maximum(prompts + answers - max_tokens, 0)
    prompts = np.maximum(prompts - excess, 1)
    return prompts, np.minimum(answers, max_tokens - prompts)


def _take_hashes(
    draft: RequestDraft, rows: Ints, prompts: Ints, answers: Ints
) -> tuple[Ints, Ints]:
    """Return the hashes of some requests as offsets and values; of a cut request what is left.

    Those of a turn that others follow reach into its answer.
    """
    offsets = np.zeros(len(rows) + 1, dtype=np.int64)
    if len(draft.hashes) == 0:
        return offsets, draft.hashes
    starts = np.cumsum(draft.num_hashes) - draft.num_hashes
    num_hashes = draft.num_hashes[rows]
    is_prompt_cut = prompts < draft.num_prefill_tokens[rows]
    is_cut = is_prompt_cut | (answers < draft.num_decode_tokens[rows])
    length = np.where(is_prompt_cut, prompts, prompts + answers)
    num_left = np.minimum(num_hashes, -(-length // draft.hash_block_tokens))
    num_kept = np.where(is_cut, num_left, num_hashes)
    np.cumsum(num_kept, out=offsets[1:])
    source = np.repeat(starts[rows] - offsets[:-1], num_kept) + np.arange(offsets[-1])
    return offsets, draft.hashes[source]


def _assign_classes(draft: RequestDraft, slo_classes: Sequence[SloClass], seed: int) -> Ints:
    """Return the class of each request: by name, or drawn once for all turns of a session."""
    if draft.class_names is None:
        shares = np.cumsum([item.share_ratio for item in slo_classes])
        draws = named_stream(seed, "slo_classes").random(int(draft.session[-1]) + 1)
        drawn = np.searchsorted(shares, draws, side="right")
        return np.where(drawn < len(slo_classes), drawn, NONE)[draft.session]
    positions = {item.name: position for position, item in enumerate(slo_classes)}
    unknown = sorted(set(draft.class_names) - positions.keys())
    if unknown:
        raise InvalidRequestError.of_field(
            "slo_classes",
            f"the trace names {', '.join(unknown)}; known are {', '.join(positions) or 'none'}",
        )
    # The last entry is what the index NONE picks.
    return np.array([*(positions[name] for name in draft.class_names), NONE])[draft.class_index]


def _rank_classes(classes: Ints, slo_classes: Sequence[SloClass]) -> tuple[Ints, Ints]:
    """Return classes and their priorities; requests of no class have priority 0."""
    if not slo_classes:
        return classes, fill_rows(len(classes), 0)
    return classes, np.array([*(item.priority for item in slo_classes), 0])[classes]


def _to_ns(times_s: Floats) -> Ints:
    if not (np.isfinite(times_s) & (times_s <= _MAX_S)).all():
        raise InvalidRequestError.of_field(
            "workload", f"times beyond {_MAX_S:.0f} s: look at rate_rps, time_scale and think_s"
        )
    return np.rint(times_s * _NS_PER_S).astype(np.int64)
