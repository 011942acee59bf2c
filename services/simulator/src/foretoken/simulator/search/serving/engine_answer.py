"""What a search knows of each kind of engine, kept from one search to the next."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from foretoken.domain import schema
from foretoken.domain.hardware.device import find_device
from foretoken.domain.requests.cluster import settle_speculation
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.requests.workload import WorkloadSpec
from foretoken.simulator.cost.surface import LatencySurfaces, SurfaceSpec
from foretoken.simulator.grid import Floats, Ints
from foretoken.simulator.kept_answers import KeptAnswers
from foretoken.simulator.latency_source import LatencySource
from foretoken.simulator.search.hardware_change import HardwareChange
from foretoken.simulator.search.serving.closed_form import (
    ReplicaForm,
    SteadyState,
    closed_form_rules,
)
from foretoken.simulator.search.serving.encoders import time_encoders
from foretoken.simulator.search.serving.load import LoadProfile
from foretoken.simulator.search.serving.prompt_queue import PromptPasses
from foretoken.simulator.search.serving.space import EngineKind, SearchSpace
from foretoken.simulator.search.serving.step_time import (
    NUM_VARIANTS,
    StepTimes,
    fetch_grids,
    grid_axes,
)
from foretoken.simulator.serving.draft import list_surface_specs
from foretoken.simulator.serving.feasibility import count_kv_blocks, judge_feasibility

# The verdict of what an engine cannot do.
ENGINE = "engine"
# The verdicts of what has no times.
NOT_ANSWERED = ("memory", "context", "layout", ENGINE, "bound")
# Limits at which memory is planned; between them room for the KV cache is linear in the batch.
_PLANNED_BATCHES = (1, 64, 256, 1024)


@dataclass(frozen=True, kw_only=True, slots=True)
class KvRoom:
    """How many requests the KV cache of a replica holds, by batch; or why a replica cannot run.

    `kv_bytes_per_token` is of the rank that holds most, `window_bytes_per_token` what it also
    holds of each token in a sliding window, `state_bytes` what of a request's recurrent state.
    """

    num_requests: Floats
    reasons: tuple[str, ...]
    verdict: str = "memory"
    kv_bytes_per_token: float = 0.0
    window_bytes_per_token: float = 0.0
    state_bytes: float = 0.0


def find_kv_room(
    kind: EngineKind,
    base: ServingScenario,
    limit: int,
    batches: Sequence[int],
    load: LoadProfile,
    hardware: HardwareChange,
) -> KvRoom:
    """Return the room of a kind of replica whose steps compute at most `limit` tokens.

    `hardware` is what changes of the kind's device.

    Raises:
        UnknownDeviceError, UnknownTopologyError, UnknownPluginError: no such name.
        InvalidRequestError: the model or the limits cannot be used.

    """
    most = base.model.max_position
    if load.shortest > most:
        reason = f"the model reads {most:,} tokens, the shortest request has {load.shortest:,}"
        return _no_room(len(batches), reason, "context")
    # A request holds most when its last token is computed.
    length = load.prefill_mean + load.decode_mean
    planned = sorted({*(b for b in _PLANNED_BATCHES if b < batches[-1]), batches[-1]})
    tokens, reasons, block_size, bytes_per_token = [], [], 1, (0.0, 0.0)
    for batch in planned:
        scenario = kind.scenario(base, batch, limit)
        engine = scenario.resolve_engine()
        device = hardware.change_device(find_device(scenario.device))
        memories, reason = judge_feasibility(scenario, engine, device, length)
        if not memories:
            return _no_room(len(batches), reason, "layout")
        blocks = 0 if reason else count_kv_blocks(scenario, engine, memories)
        tokens.append(float(blocks * engine.block_size))
        reasons.append(reason)
        block_size = engine.block_size
        bytes_per_token = max(
            (memory.kv_bytes_per_token, memory.window_bytes_per_token) for memory in memories
        )
        state_bytes = max(memory.state_bytes_per_request for memory in memories)
    # In whole blocks.
    needed = np.ceil(length / block_size) * block_size
    room = np.interp(batches, planned, tokens)
    # Even one request has to fit, the longest.
    room = np.where(room >= load.longest, room, 0.0)
    nearest = np.searchsorted(planned, batches)
    return KvRoom(
        num_requests=np.floor(room / needed) * kind.layout.dp,
        reasons=tuple(reasons[index] for index in nearest),
        kv_bytes_per_token=bytes_per_token[0],
        window_bytes_per_token=bytes_per_token[1],
        state_bytes=state_bytes,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaAnswers:
    """Replicas of a kind in one role, an entry a setting: `state` is [variant, setting].

    `batch` requests are on a replica, whose steps compute at most `step_limit` tokens; `room` is
    how many requests its KV cache holds. Where `verdict` is not "ok" `reason` says why a setting
    cannot be.
    """

    batch: Ints
    step_limit: Ints
    room: Floats
    verdict: np.ndarray
    reason: np.ndarray
    state: SteadyState


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineAnswer:
    """The answers of a kind of engine in each role, and the KV bytes of a token on its ranks.

    `passes` are those of the prefill replicas, whose state is that of full ones; its TTFT is alone.
    `window_bytes_per_token` are those of each token in a sliding window as well, `state_bytes` a
    request's recurrent state. Where it is sent embeddings, `encoding_us` is what making those of a
    prompt takes a device as its own. A replica has `num_devices`.
    """

    kind: EngineKind
    num_devices: int
    aggregated: ReplicaAnswers
    prefill: ReplicaAnswers
    passes: PromptPasses
    decode: ReplicaAnswers
    kv_bytes_per_token: float
    window_bytes_per_token: float
    state_bytes: float
    encoding_us: float = 0.0


@dataclass(frozen=True, slots=True)
class StepGrid:
    """What the steps of an engine cost, and those of its draft (None: it has none)."""

    spec: SurfaceSpec
    surfaces: LatencySurfaces
    draft: "StepGrid | None" = None

    def times(self) -> StepTimes:
        """Return how long steps take."""
        return StepTimes(self.spec, self.surfaces, self.draft.times() if self.draft else None)


def make_replica_form(
    kind: EngineKind, base: ServingScenario, times: StepTimes, load: LoadProfile
) -> ReplicaForm:
    """Return the closed form of a kind of engine; its rules depend on no limit."""
    profile = kind.resolve_engine(base)
    speculation = settle_speculation(kind.speculation, base.speculative)
    rules = closed_form_rules(profile, kind.layout, speculation, base.model)
    return ReplicaForm(times, rules, load)


# Pools that a kind of engine may be of.
_ROLES = ("aggregated", "prefill", "decode")


def _no_room(num_batches: int, reason: str = "", verdict: str = "memory") -> KvRoom:
    """Return the room of what cannot run, or what no pool may have."""
    none = np.zeros(num_batches)
    return KvRoom(num_requests=none, reasons=(reason,) * num_batches, verdict=verdict)


class EngineForm:
    """Answers for a kind of engine; what it takes from memory planning is done once."""

    def __init__(
        self,
        kind: EngineKind,
        base: ServingScenario,
        space: SearchSpace,
        load: LoadProfile,
        hardware: HardwareChange,
    ) -> None:
        """Plan the memory of a kind on devices that are changed."""
        self._kind, self._base, self._space, self._load = kind, base, space, load
        self._batches = sorted({*space.batches, *space.prefill_batches})
        self._lacks = {role: kind.find_lacks(base, role) for role in _ROLES}
        is_possible = not all(self._lacks.values())
        self._rooms: dict[int, KvRoom] = {
            limit: find_kv_room(kind, base, limit, self._batches, load, hardware)
            if is_possible
            else _no_room(len(self._batches))
            for limit in space.step_limits
        }

    @property
    def can_run(self) -> bool:
        """Whether any setting can."""
        return any(room.num_requests.any() for room in self._rooms.values())

    def answer(self, times: StepTimes | None) -> EngineAnswer:
        """Return the answers; without times, for what cannot run, all are ruled out."""
        form = None
        if times is not None:
            form = make_replica_form(self._kind, self._base, times, self._load)
        rooms = self._rooms.values()
        prefill, passes = self._prefill(form)
        return EngineAnswer(
            kind=self._kind,
            num_devices=self._kind.scenario(self._base, 1, 0).num_devices,
            aggregated=self._aggregated(form),
            prefill=prefill,
            passes=passes,
            decode=self._decode(form),
            kv_bytes_per_token=max(room.kv_bytes_per_token for room in rooms),
            window_bytes_per_token=max(room.window_bytes_per_token for room in rooms),
            state_bytes=max(room.state_bytes for room in rooms),
        )

    def _aggregated(self, form: ReplicaForm | None) -> ReplicaAnswers:
        """Return all batches at all limits; limits that no step of a batch reaches are one."""
        settings = []
        for batch in self._space.batches:
            most = batch * (self._load.longest + 1)
            known: set[int] = set()
            for limit in self._space.step_limits:
                if min(limit, most) not in known:
                    known.add(min(limit, most))
                    settings.append((batch, limit))
        batch, limit = np.array(settings, dtype=np.int64).T
        state = form.aggregated(batch.astype(float), limit.astype(float)) if form else None
        return self._judged("aggregated", batch, limit, state)

    def _prefill(self, form: ReplicaForm | None) -> tuple[ReplicaAnswers, PromptPasses]:
        """Return prompts computed together; those that make the same steps are one."""
        settings: dict[float, tuple[int, int]] = {}
        for batch in self._space.prefill_batches:
            for limit in self._space.step_limits:
                settings.setdefault(min(limit, batch * self._load.prefill_mean), (batch, limit))
        batch, limit = np.array(list(settings.values()), dtype=np.int64).T
        nothing = np.zeros((NUM_VARIANTS, len(batch)))
        passes = PromptPasses(alone_us=nothing, single_us=nothing, each_us=nothing, most=nothing)
        if form:
            passes = form.prefill(batch.astype(float), limit.astype(float))
        state = SteadyState(ttft_us=passes.alone_us, tpot_us=nothing, rate_rps=passes.full_rps)
        return self._judged("prefill", batch, limit, state), passes

    def _decode(self, form: ReplicaForm | None) -> ReplicaAnswers:
        """Return batches that only decode, in steps just large enough."""
        batch = np.array(self._space.batches, dtype=np.int64)
        limits = np.array(self._space.step_limits, dtype=np.int64)
        places = np.minimum(np.searchsorted(limits, batch), len(limits) - 1)
        state = form.decode(batch.astype(float)) if form else None
        return self._judged("decode", batch, limits[places], state)

    def _judged(
        self, role: str, batch: Ints, limit: Ints, state: SteadyState | None
    ) -> ReplicaAnswers:
        room = np.zeros(len(batch))
        verdict = np.full(len(batch), "ok", dtype=object)
        reason = np.full(len(batch), "", dtype=object)
        for index, (size, tokens) in enumerate(zip(batch.tolist(), limit.tolist(), strict=True)):
            found = self._rooms[tokens]
            place = self._batches.index(size)
            room[index] = found.num_requests[place]
            if self._lacks[role]:
                verdict[index], reason[index] = ENGINE, self._lacks[role]
            elif found.reasons[place]:
                verdict[index], reason[index] = found.verdict, found.reasons[place]
            elif size > room[index]:
                verdict[index] = "memory"
                reason[index] = f"the KV cache of a replica holds {room[index]:.0f} requests"
            elif size > tokens * self._kind.layout.dp * self._kind.layout.pp:
                verdict[index] = "bound"
                reason[index] = f"steps of {tokens} tokens do not decode {size} requests"
        nothing = np.zeros((NUM_VARIANTS, len(batch)))
        none = SteadyState(ttft_us=nothing, tpot_us=nothing, rate_rps=nothing)
        return ReplicaAnswers(
            batch=batch,
            step_limit=limit,
            room=room,
            verdict=verdict,
            reason=reason,
            state=state or none,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineAnswers:
    """The answers of all kinds of engines of a space, and the model version they rest on."""

    engines: Sequence[EngineAnswer]
    model_version: str


@dataclass(frozen=True, slots=True)
class _About:
    """What the answer of a kind of engine depends on but for the predictor."""

    base_json: str
    load: LoadProfile
    batches: Sequence[int]
    prefill_batches: Sequence[int]
    step_limits: Sequence[int]
    kind: EngineKind


class AnswerCache:
    """Queries the predictor once about all engines of a search that are not known yet."""

    def __init__(
        self, predictor: LatencySource, max_kept: int, hardware: HardwareChange | None = None
    ) -> None:
        """Keep up to so many answers, of devices whose memory is changed where `hardware` says."""
        self._predictor = predictor
        self._hardware = hardware or HardwareChange()
        self._kept = KeptAnswers[_About, EngineAnswer](predictor, max_kept)

    def answer(self, base: ServingScenario, space: SearchSpace, load: LoadProfile) -> EngineAnswers:
        """Return the answer of every kind of engine of a space.

        Raises:
            InvalidRequestError: the model or the engine's limits cannot be used.
            ForetokenError: whatever the predictor raises.

        """
        base = engine_base(base)
        text = json.dumps(schema.encode(base), sort_keys=True)
        sizes = (space.batches, space.prefill_batches, space.step_limits)

        def ask(missing: Sequence[_About]) -> tuple[list[EngineAnswer], str]:
            return self._ask([about.kind for about in missing], base, space, load)

        abouts = [_About(text, load, *sizes, kind) for kind in space.kinds]
        engines, version = self._kept.answer(abouts, ask, base.correction)
        return EngineAnswers(engines=engines, model_version=version)

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
        times = {number: grid.times() for number, grid in zip(asked, grids, strict=True)}
        encoding_us = time_encoders(able, base, self._predictor)
        answers = [
            replace(
                form.answer(times.get(number)),
                encoding_us=encoding_us.get(kind.device, 0.0) if kind.encodes_apart else 0.0,
            )
            for number, (kind, form) in enumerate(zip(kinds, forms, strict=True))
        ]
        if grids:
            return answers, grids[0].surfaces.model_version
        return answers, self._kept.active_version()


def engine_base(scenario: ServingScenario) -> ServingScenario:
    """Return what a scenario says of engines, without its load, but for images, and its cluster."""
    workload = WorkloadSpec() if scenario.workload.is_text else scenario.workload
    return replace(scenario, name="serving", workload=workload, cluster=None)


def fetch_engines(
    kinds: Sequence[EngineKind],
    base: ServingScenario,
    space: SearchSpace,
    load: LoadProfile,
    predictor: LatencySource,
) -> list[StepGrid]:
    """Return what the steps of engines cost at all settings of a space.

    Raises:
        InvalidRequestError: the model or the engine's limits cannot be used.
        ForetokenError: whatever the predictor raises.

    """
    pairs = [_widest_specs(kind, base, space, load) for kind in kinds]
    sizes = sorted({*space.batches, *space.prefill_batches})
    specs = [spec for pair in pairs for spec in pair if spec is not None]
    wanted = [(spec, grid_axes(spec, load, sizes)) for spec in specs]
    found = iter(zip(specs, fetch_grids(wanted, predictor), strict=True))
    return [
        StepGrid(*next(found), draft=StepGrid(*next(found)) if draft is not None else None)
        for _, draft in pairs
    ]


def _widest_specs(
    kind: EngineKind, base: ServingScenario, space: SearchSpace, load: LoadProfile
) -> tuple[SurfaceSpec, SurfaceSpec | None]:
    """Return what the widest limits of a space ask about, and of its draft: others need no more."""
    scenario = kind.scenario(base, space.batches[-1], space.step_limits[-1])
    spec, draft = list_surface_specs(scenario, min(load.longest, base.model.max_position))
    if spec.images is not None:
        # The closed form computes prompts in equal pieces.
        images = replace(spec.images, spread_tokens=max(round(load.prefill_mean), 1))
        spec = replace(spec, images=images)
    return spec, draft
