"""The closed-form answer of a request, what its time rests on, and what changes it."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from foretoken.domain.measurements.estimate import Provenance
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.requests.search import Sensitivity, ServingSearchReport, ServingSearchRequest
from foretoken.domain.units import US_PER_S
from foretoken.simulator.cluster.encoding import embedding_bytes
from foretoken.simulator.grid import Floats
from foretoken.simulator.latency_source import LatencySource
from foretoken.simulator.search.hardware_change import (
    HARDWARE_CHANGES,
    FasterPredictor,
    HardwareChange,
)
from foretoken.simulator.search.serving.closed_form import ReplicaForm
from foretoken.simulator.search.serving.encoders import EncoderTimes, put_before
from foretoken.simulator.search.serving.engine_answer import (
    AnswerCache,
    EngineAnswer,
    EngineAnswers,
    engine_base,
    fetch_engines,
    make_replica_form,
)
from foretoken.simulator.search.serving.load import LoadProfile
from foretoken.simulator.search.serving.match import (
    PairSearch,
    find_link,
    make_aggregated,
    match_pairs,
)
from foretoken.simulator.search.serving.points import Points, join_points, rule_out_late
from foretoken.simulator.search.serving.rank import Figures, Ranking, find_figures, rank_points
from foretoken.simulator.search.serving.space import SearchSpace
from foretoken.simulator.search.serving.step_time import ProvenanceTimes, StepMix
from foretoken.simulator.search.serving.table import name_of


@dataclass(frozen=True, kw_only=True, slots=True)
class ClosedForm:
    """The closed-form answer of a request: every point, ranked, and what it rests on.

    `num_ruled_out` counts by verdict the pairs with a pool that is ruled out by itself; they are
    not among the points.
    """

    request: ServingSearchRequest
    space: SearchSpace
    load: LoadProfile
    answers: EngineAnswers
    points: Points
    figures: Figures
    ranking: Ranking
    num_ruled_out: Mapping[str, int]


def make_closed_form(
    request: ServingSearchRequest, space: SearchSpace, load: LoadProfile, answers: EngineAnswers
) -> ClosedForm:
    """Return every point of a space and its rank, from the answers of the engines."""
    parts: list[Points] = []
    ruled_out = Counter[str]()
    for num_encoders in space.encoders:
        found, more = _with_encoders(num_encoders, request, space, load, answers)
        parts.append(found)
        ruled_out.update(more)
    points = _with_routers(join_points(parts), len(space.routers))
    points = _rule_out_large(points, space.max_devices)
    points = rule_out_late(points, request, load)
    figures = find_figures(points, answers.engines, load, request)
    return ClosedForm(
        request=request,
        space=space,
        load=load,
        answers=answers,
        points=points,
        figures=figures,
        ranking=rank_points(points, figures, request.objective),
        num_ruled_out={name: num * len(space.routers) for name, num in ruled_out.items()},
    )


def _with_encoders(
    num_encoders: int,
    request: ServingSearchRequest,
    space: SearchSpace,
    load: LoadProfile,
    answers: EngineAnswers,
) -> tuple[Points, Mapping[str, int]]:
    """Return the points with so many replicas that encode images apart, and pairs ruled out.

    Engines have the devices that encoders leave.
    """
    engines = {
        number: answer
        for number, answer in enumerate(answers.engines)
        if answer.kind.encodes_apart == (num_encoders > 0)
    }
    parts: list[Points] = []
    ruled_out: Mapping[str, int] = {}
    left = space.max_devices - num_encoders
    if "aggregated" in space.modes:
        parts.append(make_aggregated(engines, load, left, request.target_rps))
    if "disaggregated" in space.modes:
        pairs = PairSearch(
            scenario=request.scenario,
            targets=request.targets,
            load=load,
            max_devices=left,
            target_rps=request.target_rps,
            counts_idle=request.counts_idle,
        )
        found, ruled_out = match_pairs(pairs, engines)
        parts.append(found)
    points = join_points(parts)
    if num_encoders:
        times = [_encoder_times(request.scenario, answer) for answer in answers.engines]
        points = put_before(points, num_encoders, times)
    return points, ruled_out


def _encoder_times(scenario: ServingScenario, answer: EngineAnswer) -> EncoderTimes:
    images = scenario.workload.images
    if images is None:
        return EncoderTimes(encode_us=0.0, sent_us=0.0)
    bandwidth, latency_us = find_link(scenario, answer.kind.device)
    sent_us = latency_us + embedding_bytes(scenario.model, images) / bandwidth * US_PER_S
    return EncoderTimes(encode_us=answer.encoding_us, sent_us=sent_us)


def _with_routers(points: Points, num_routers: int) -> Points:
    """Return the points behind each router; one replica has no need of any, so one is enough."""
    if num_routers == 1:
        return points
    entries = np.where(points.prefill_kind >= 0, points.prefill_replicas, points.replicas)
    rows = np.arange(len(points))
    parts = [points]
    for router in range(1, num_routers):
        other = points.take(rows[entries > 1])
        parts.append(replace(other, router=other.router + router))
    return join_points(parts)


def _rule_out_large(points: Points, max_devices: int) -> Points:
    large = points.is_ok & (points.num_devices > max_devices)
    reasons = [
        f"needs {num} devices of {max_devices}" for num in points.num_devices[large].tolist()
    ]
    return points.rule_out(large, "devices", reasons)


def share_best_time(form: ClosedForm, predictor: LatencySource) -> Mapping[str, float]:
    """Return the shares of the best deployment's busy time by `Provenance` in lower case.

    The engines of its pools, and no others, are asked about once more, at the points of the search;
    each counts by its time for a request. A point must qualify.
    """
    best = form.points.take(form.ranking.leaders[:1])
    time_us = np.zeros(len(Provenance))
    if best.prefill_kind[0] >= 0:
        time_us += _time_by_provenance(form, int(best.prefill_kind[0]), "prefill", predictor)
        time_us += _time_by_provenance(form, int(best.kind[0]), "decode", predictor)
    else:
        time_us += _time_by_provenance(form, int(best.kind[0]), "aggregated", predictor)
    total_us = float(time_us.sum())
    return {
        member.name.lower(): float(part) / total_us
        for member, part in zip(Provenance, time_us, strict=True)
    }


def _time_by_provenance(
    form: ClosedForm, number: int, role: str, predictor: LatencySource
) -> Floats:
    """Return the µs that a replica of a role takes for a request of the best, by provenance."""
    best, kind = form.points.take(form.ranking.leaders[:1]), form.answers.engines[number].kind
    base = engine_base(form.request.scenario)
    (grid,) = fetch_engines([kind], base, form.space, form.load, predictor)
    replica = make_replica_form(kind, base, grid.times(), form.load)
    mix = _mix(replica, role, best, max(form.load.decode_mean - 1.0, 0.0))
    time_us: Floats = ProvenanceTimes(grid.spec, grid.surfaces).time_request_us(mix)[:, 0]
    return time_us


def _mix(replica: ReplicaForm, role: str, best: Points, num_decoded: float) -> StepMix:
    if role == "aggregated":
        return replica.aggregated_mix(best.batch.astype(float), best.step_limit.astype(float))
    if role == "prefill":
        limit = best.prefill_limit.astype(float)
        return replica.prefill_mix(best.prefill_batch.astype(float), limit)
    # As many decode together as come while one does, where prompts are what limits the rate.
    rate = best.rate_rps[0] / best.replicas / US_PER_S
    return replica.decode_mix(np.minimum(best.batch, rate * best.tpot_us[0] * num_decoded))


def find_sensitivities(
    form: ClosedForm, report: ServingSearchReport, predictor: LatencySource
) -> tuple[Sensitivity, ...]:
    """Return the best answer with one part of the hardware, or the lengths of requests, changed."""
    best = float(report.candidates.output_throughput_tps_per_gpu[0])
    changed: dict[str, Callable[[], ClosedForm]] = {
        words: _with_hardware(form, predictor, change) for words, change in HARDWARE_CHANGES.items()
    }
    for name, lengths in _length_changes().items():
        changed[name] = _with_lengths(form, predictor, lengths)
    found = []
    for change, answer in changed.items():
        other = answer()
        row = int(other.ranking.order[0])
        has_any = bool(other.points.is_ok.any())
        name = name_of(other.points, row, other.answers.engines, other.space) if has_any else ""
        tps = float(other.figures.tps_per_gpu[0, row]) if has_any else 0.0
        found.append(
            Sensitivity(
                change=change,
                best=name,
                output_throughput_tps_per_gpu=tps,
                throughput_ratio=tps / best if best else 0.0,
                ttft_ms=float(other.points.ttft_us[0, row]) / 1000.0 if has_any else 0.0,
                tpot_ms=float(other.points.tpot_us[0, row]) / 1000.0 if has_any else 0.0,
                is_same_best=name == report.best,
            )
        )
    return tuple(found)


def _length_changes() -> Mapping[str, tuple[float, float]]:
    return {
        "prompts half as long": (0.5, 1.0),
        "prompts twice as long": (2.0, 1.0),
        "answers half as long": (1.0, 0.5),
        "answers twice as long": (1.0, 2.0),
    }


def _with_hardware(
    form: ClosedForm, predictor: LatencySource, change: HardwareChange
) -> Callable[[], ClosedForm]:
    def answer() -> ClosedForm:
        cache = AnswerCache(FasterPredictor(predictor, change), 1, change)
        answers = cache.answer(form.request.scenario, form.space, form.load)
        return make_closed_form(form.request, form.space, form.load, answers)

    return answer


def _with_lengths(
    form: ClosedForm, predictor: LatencySource, lengths: tuple[float, float]
) -> Callable[[], ClosedForm]:
    def answer() -> ClosedForm:
        load = form.load.stretched(*lengths)
        answers = AnswerCache(predictor, 1).answer(form.request.scenario, form.space, load)
        return make_closed_form(form.request, form.space, load, answers)

    return answer
