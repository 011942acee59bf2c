"""What the best answer becomes when one thing changes."""

from collections.abc import Callable, Mapping

from foretoken.domain.requests.search import Sensitivity, ServingSearchReport
from foretoken.simulator.latency_source import LatencySource
from foretoken.simulator.search.faster_predictor import FasterPredictor
from foretoken.simulator.search.hardware_change import HARDWARE_CHANGES, HardwareChange
from foretoken.simulator.search.serving.answer_cache import AnswerCache
from foretoken.simulator.search.serving.outcome import ClosedForm, make_closed_form
from foretoken.simulator.search.serving.table import name_of


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
