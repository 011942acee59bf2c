"""What the time of the best deployment rests on, where none was simulated."""

from collections.abc import Mapping

import numpy as np

from foretoken.domain.measurements.estimate import Provenance
from foretoken.domain.units import US_PER_S
from foretoken.simulator.grid import Floats
from foretoken.simulator.latency_source import LatencySource
from foretoken.simulator.search.serving.answer_cache import engine_base, fetch_engines
from foretoken.simulator.search.serving.closed_form import ReplicaForm
from foretoken.simulator.search.serving.engine_answer import make_replica_form
from foretoken.simulator.search.serving.outcome import ClosedForm
from foretoken.simulator.search.serving.points import Points
from foretoken.simulator.search.serving.step_time import ProvenanceTimes, StepMix, StepTimes


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
    replica = make_replica_form(kind, base, StepTimes(*grid), form.load)
    mix = _mix(replica, role, best, max(form.load.decode_mean - 1.0, 0.0))
    time_us: Floats = ProvenanceTimes(*grid).time_request_us(mix)[:, 0]
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
