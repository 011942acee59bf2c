"""Answers of engines, kept from one search to the next."""

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from foretoken.domain import schema
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.requests.workload import WorkloadSpec
from foretoken.simulator.cost.latency_surfaces import surface_spec
from foretoken.simulator.cost.surface import LatencySurfaces, SurfaceSpec
from foretoken.simulator.latency_source import LatencySource
from foretoken.simulator.search.hardware_change import HardwareChange
from foretoken.simulator.search.serving.engine_answer import EngineAnswer, EngineForm
from foretoken.simulator.search.serving.load import LoadProfile
from foretoken.simulator.search.serving.space import EngineKind, SearchSpace
from foretoken.simulator.search.serving.step_grid import fetch_grids, grid_axes
from foretoken.simulator.search.serving.step_time import StepTimes


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineAnswers:
    """The answers of all kinds of engines of a space, and the model version they rest on."""

    engines: Sequence[EngineAnswer]
    model_version: str


class AnswerCache:
    """Queries the predictor once about all engines of a search that are not known yet.

    An answer is known by all it depends on and the version of the predictor's model; what a
    predictor without one active model answers is not kept.
    """

    def __init__(
        self, predictor: LatencySource, max_kept: int, hardware: HardwareChange | None = None
    ) -> None:
        """Keep up to so many answers, of devices whose memory is changed where `hardware` says."""
        self._predictor = predictor
        self._hardware = hardware or HardwareChange()
        self._max_kept = max_kept
        self._kept: OrderedDict[tuple[object, ...], EngineAnswer] = OrderedDict()
        self._lock = threading.Lock()

    def answer(self, base: ServingScenario, space: SearchSpace, load: LoadProfile) -> EngineAnswers:
        """Return the answer of every kind of engine of a space.

        Raises:
            InvalidRequestError: the model or the engine's limits cannot be used.
            ForetokenError: whatever the predictor raises.

        """
        base = engine_base(base)
        about = (
            json.dumps(schema.encode(base), sort_keys=True),
            load,
            space.batches,
            space.prefill_batches,
            space.step_limits,
        )
        version = self._version()
        with self._lock:
            found = {
                kind: self._kept[*about, kind, version]
                for kind in space.kinds
                if (*about, kind, version) in self._kept
            }
        missing = [kind for kind in space.kinds if kind not in found]
        if missing:
            answers, version = self._ask(missing, base, space, load)
            with self._lock:
                for kind, answer in zip(missing, answers, strict=True):
                    found[kind] = answer
                    if version:
                        self._kept[*about, kind, version] = answer
                while len(self._kept) > self._max_kept:
                    self._kept.popitem(last=False)
        return EngineAnswers(engines=[found[kind] for kind in space.kinds], model_version=version)

    def _ask(
        self,
        kinds: Sequence[EngineKind],
        base: ServingScenario,
        space: SearchSpace,
        load: LoadProfile,
    ) -> tuple[list[EngineAnswer], str]:
        forms = [EngineForm(kind, base, space, load, self._hardware) for kind in kinds]
        asked = [number for number, form in enumerate(forms) if form.can_run]
        able = [kinds[number] for number in asked]
        grids = fetch_engines(able, base, space, load, self._predictor)
        times = {number: StepTimes(*grid) for number, grid in zip(asked, grids, strict=True)}
        answers = [form.answer(times.get(number)) for number, form in enumerate(forms)]
        return answers, grids[0][1].model_version if grids else self._version()

    def _version(self) -> str:
        active = [model.version for model in self._predictor.list_models() if model.is_active]
        return active[0] if len(active) == 1 else ""


def engine_base(scenario: ServingScenario) -> ServingScenario:
    """Return what a scenario says of engines, without its load and its cluster."""
    return replace(scenario, name="serving", workload=WorkloadSpec(), cluster=None)


def fetch_engines(
    kinds: Sequence[EngineKind],
    base: ServingScenario,
    space: SearchSpace,
    load: LoadProfile,
    predictor: LatencySource,
) -> list[tuple[SurfaceSpec, LatencySurfaces]]:
    """Return what the steps of engines cost at all settings of a space.

    Raises:
        InvalidRequestError: the model or the engine's limits cannot be used.
        ForetokenError: whatever the predictor raises.

    """
    specs = [_widest_spec(kind, base, space, load) for kind in kinds]
    sizes = sorted({*space.batches, *space.prefill_batches})
    wanted = [(spec, grid_axes(spec, load, sizes)) for spec in specs]
    return list(zip(specs, fetch_grids(wanted, predictor), strict=True))


def _widest_spec(
    kind: EngineKind, base: ServingScenario, space: SearchSpace, load: LoadProfile
) -> SurfaceSpec:
    """Return what the widest limits of a space ask about; narrower ones need no more."""
    scenario = kind.scenario(base, space.batches[-1], space.step_limits[-1])
    return surface_spec(scenario, min(load.longest, base.model.max_position))
