"""What a search knows of one kind of engine: its room, and its steady states at all its limits."""

from dataclasses import dataclass, replace

import numpy as np

from foretoken.domain.requests.scenario import ServingScenario
from foretoken.simulator.grid import Floats, Ints
from foretoken.simulator.search.hardware_change import HardwareChange
from foretoken.simulator.search.serving.closed_form import ReplicaForm, SteadyState
from foretoken.simulator.search.serving.load import LoadProfile
from foretoken.simulator.search.serving.prompt_queue import PromptPasses
from foretoken.simulator.search.serving.prune import ENGINE, KvRoom, find_kv_room
from foretoken.simulator.search.serving.rules import closed_form_rules
from foretoken.simulator.search.serving.space import EngineKind, SearchSpace
from foretoken.simulator.search.serving.step_time import NUM_VARIANTS, StepTimes


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
    `window_bytes_per_token` are those of each token in a sliding window as well.
    """

    kind: EngineKind
    aggregated: ReplicaAnswers
    prefill: ReplicaAnswers
    passes: PromptPasses
    decode: ReplicaAnswers
    kv_bytes_per_token: float
    window_bytes_per_token: float


def make_replica_form(
    kind: EngineKind, base: ServingScenario, times: StepTimes, load: LoadProfile
) -> ReplicaForm:
    """Return the closed form of a kind of engine; its rules depend on no limit."""
    profile = replace(base.engine, profile=kind.profile).resolve()
    return ReplicaForm(times, closed_form_rules(profile, kind.layout), load)


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
        self._lack_of_pools = kind.find_lacks(base, "disaggregated")
        self._rooms: dict[int, KvRoom] = {
            limit: find_kv_room(kind, base, limit, self._batches, load, hardware)
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
            aggregated=self._aggregated(form),
            prefill=prefill,
            passes=passes,
            decode=self._decode(form),
            kv_bytes_per_token=max(room.kv_bytes_per_token for room in rooms),
            window_bytes_per_token=max(room.window_bytes_per_token for room in rooms),
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
        return self._judged(batch, limit, state)

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
        answers = self._judged(batch, limit, state)
        if not self._lack_of_pools:
            return answers, passes
        # Pairs are counted by what rules their prefill pool out.
        size = len(batch)
        answers = replace(
            answers,
            verdict=np.full(size, ENGINE, dtype=object),
            reason=np.full(size, self._lack_of_pools, dtype=object),
        )
        return answers, passes

    def _decode(self, form: ReplicaForm | None) -> ReplicaAnswers:
        """Return batches that only decode, in steps just large enough."""
        batch = np.array(self._space.batches, dtype=np.int64)
        limits = np.array(self._space.step_limits, dtype=np.int64)
        places = np.minimum(np.searchsorted(limits, batch), len(limits) - 1)
        state = form.decode(batch.astype(float)) if form else None
        return self._judged(batch, limits[places], state)

    def _judged(self, batch: Ints, limit: Ints, state: SteadyState | None) -> ReplicaAnswers:
        room = np.zeros(len(batch))
        verdict = np.full(len(batch), "ok", dtype=object)
        reason = np.full(len(batch), "", dtype=object)
        for index, (size, tokens) in enumerate(zip(batch.tolist(), limit.tolist(), strict=True)):
            found = self._rooms[tokens]
            place = self._batches.index(size)
            room[index] = found.num_requests[place]
            if found.reasons[place]:
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
