"""What the best answer becomes when one thing changes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from foretoken.domain.estimate import LatencyColumns, LatencyQuery, LatencyReply, OperatorTable
from foretoken.domain.hardware.device import find_device
from foretoken.domain.hardware.roofline import RooflineTerms, collective_terms, compute_terms
from foretoken.domain.hardware.topology import find_topology, topology_of_device
from foretoken.domain.operator import find_operator
from foretoken.domain.ports import ModelVersion
from foretoken.domain.search import Sensitivity, ServingSearchReport
from foretoken.simulator.grid import Floats
from foretoken.simulator.search.serving.answer_cache import AnswerCache
from foretoken.simulator.search.serving.outcome import ClosedForm, make_closed_form
from foretoken.simulator.search.serving.step_grid import LatencySource
from foretoken.simulator.search.serving.table import name_of

# How much faster a part of the hardware is.
_FACTOR = 2.0
_PARTS = {"links": "links", "memory": "memory bandwidth", "arithmetic": "arithmetic"}


class FasterPredictor:
    """Answers for devices of which one part is twice as fast, from those of the real ones.

    No predictor has measured such a device. An operator keeps the share it reaches of its roofline,
    the larger of its arithmetic and its bytes, each over what the device can do; of a collective
    the bytes go over faster links and the latency stays. So what is bound by another part does not
    change, and what is bound by this one does until the other binds.
    """

    def __init__(self, predictor: LatencySource, part: str) -> None:
        self._predictor, self._part = predictor, part

    def list_models(self) -> Sequence[ModelVersion]:
        """Return none: what is not real is not kept."""
        return ()

    def predict(self, query: LatencyQuery) -> LatencyReply:
        """Return the estimates of the changed device."""
        reply = self._predictor.predict(query)
        tables = tuple(
            _scaled(answer, self._ratio(table, query))
            for table, answer in zip(query.tables, reply.tables, strict=True)
        )
        return replace(reply, tables=tables)

    def _ratio(self, table: OperatorTable, query: LatencyQuery) -> Floats:
        """Return the time on the changed device over that on the real one, row by row."""
        spec = find_operator(table.operator)
        dims = {name: np.asarray(column) for name, column in table.columns.items()}
        if spec.is_collective:
            topology = (
                find_topology(query.topology)
                if query.topology
                else topology_of_device(query.device)
            )
            terms = [
                collective_terms(spec, dims, int(nodes), topology)
                for nodes in np.unique(np.atleast_1d(dims.get("num_nodes", np.ones(1))))
            ]
            if self._part != "links" or len(terms) != 1:
                return np.ones(table.num_rows)
            moved = np.asarray(terms[0].memory_us, dtype=np.float64)
            whole = moved + terms[0].floor_us
            ratio: Floats = (moved / _FACTOR + terms[0].floor_us) / np.maximum(whole, 1e-12)
            return ratio
        device = find_device(query.device)
        return self._compute_ratio(compute_terms(spec, dims, table.dtype, table.phase, device))

    def _compute_ratio(self, terms: RooflineTerms) -> Floats:
        compute = np.asarray(terms.compute_us, dtype=np.float64)
        memory = np.asarray(terms.memory_us, dtype=np.float64)
        faster_compute = compute / (_FACTOR if self._part == "arithmetic" else 1.0)
        faster_memory = memory / (_FACTOR if self._part == "memory" else 1.0)
        before = np.maximum(compute, memory)
        after = np.maximum(faster_compute, faster_memory)
        return np.where(before > 0.0, after / np.maximum(before, 1e-12), 1.0)


def find_sensitivities(
    form: ClosedForm, report: ServingSearchReport, predictor: LatencySource
) -> tuple[Sensitivity, ...]:
    """Return the best answer with one part of the hardware, or the lengths of requests, changed."""
    best = float(report.candidates.output_throughput_tps_per_gpu[0])
    changed: dict[str, Callable[[], ClosedForm]] = {
        f"{words} twice as fast": _with_hardware(form, predictor, part)
        for part, words in _PARTS.items()
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
    form: ClosedForm, predictor: LatencySource, part: str
) -> Callable[[], ClosedForm]:
    def answer() -> ClosedForm:
        cache = AnswerCache(FasterPredictor(predictor, part), 1)
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


def _scaled(answer: LatencyColumns, ratio: Floats) -> LatencyColumns:
    return replace(
        answer,
        latency_us=answer.latency_us * ratio,
        low_us=answer.low_us * ratio,
        high_us=answer.high_us * ratio,
    )
