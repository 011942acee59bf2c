"""The steady state of a serving replica, without simulating it.

Mean-value analysis of an engine's loop. A replica of `concurrency` requests always has that many,
for a new one comes when one is done. Of every request a step computes a piece of the prompt or one
token of the answer. Per step as many prompt tokens are computed as the requests that finish in it
bring back, which says what share of the steps is mixed; the time of the steps says how fast this
goes; Little's law ties rate, TTFT and TPOT together. Nothing here is fitted.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from foretoken.domain.frameworks.engine import EngineProfile
from foretoken.domain.models.architecture import ModelArchitecture
from foretoken.domain.models.stack import stack_of
from foretoken.domain.requests.cluster import SpeculativeSpec
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.units import US_PER_S
from foretoken.simulator.grid import Floats
from foretoken.simulator.search.serving.load import LoadProfile
from foretoken.simulator.search.serving.prompt_queue import PromptPasses
from foretoken.simulator.search.serving.step_time import (
    NUM_VARIANTS,
    DecodeSteps,
    MixedSteps,
    StepMix,
)
from foretoken.simulator.serving.draft import follow_speculation

# Schedulers that compute prompts in steps of their own, while nobody decodes.
_PROMPTS_FIRST = frozenset({"lightllm", "sglang", "vllm_v0"})
# Schedulers that compute a prompt in pieces of whatever a step has left.
_SPLITTING = frozenset({"chunked_prefill", "sarathi", "sglang"})
# A batch runs until its last request is done: no steady state of steps.
_WITHOUT_FORM = frozenset({"static_batch"})


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineRules:
    """How an engine fills its steps, and what its host takes.

    `mixes` prompts with decoding sequences; `splits` prompts into what a step has left, else only
    whole ones are computed. `num_engines` run in lock step; `num_stages` batches are in flight. A
    sequence that decodes computes `tokens_per_seq` in a step, of which it keeps `tokens_per_step`.
    A step with prompts of lengths that differ takes `compile_us` more: no two have as many tokens.
    Of prompts that join, as many in each step as end, each token takes `admission_us_per_token`.
    """

    mixes: bool
    splits: bool
    is_asynchronous: bool
    num_engines: int
    num_stages: int
    max_num_prefills: int
    step_us: float
    step_us_per_seq: float
    output_us_per_seq: float
    output_us_per_past_token: float
    frontend_us: float
    frontend_us_per_token: float
    executor_us_per_token: float
    tokens_per_seq: int = 1
    tokens_per_step: float = 1.0
    compile_us: float = 0.0
    admission_us_per_token: float = 0.0


def closed_form_rules(
    profile: EngineProfile,
    layout: ParallelLayout,
    speculation: SpeculativeSpec | None = None,
    model: ModelArchitecture | None = None,
) -> EngineRules:
    """Return the rules of an engine on a layout; without `model` nothing is compiled for it."""
    profile = follow_speculation(profile, speculation)
    kinds = stack_of(model).kinds if model else ()
    return EngineRules(
        mixes=profile.scheduler not in _PROMPTS_FIRST or profile.mixes_prefill,
        splits=profile.scheduler in _SPLITTING or profile.max_chunk_tokens > 0,
        is_asynchronous=profile.has_async_scheduling and layout.pp == 1,
        num_engines=layout.dp,
        num_stages=layout.pp,
        max_num_prefills=profile.max_num_prefills,
        step_us=profile.host_us + profile.output_us,
        step_us_per_seq=profile.host_us_per_seq,
        output_us_per_seq=profile.output_us_per_seq,
        output_us_per_past_token=profile.output_us_per_past_token,
        frontend_us=1000.0 * profile.frontend_ms,
        frontend_us_per_token=profile.frontend_us_per_token,
        executor_us_per_token=profile.executor_us_per_token,
        tokens_per_seq=1 + speculation.num_draft_tokens if speculation else 1,
        tokens_per_step=speculation.tokens_per_step if speculation else 1.0,
        compile_us=profile.compile_us_of(kind.name for kind in kinds),
        admission_us_per_token=profile.admission_us_per_token,
    )


def has_closed_form(profile: EngineProfile) -> bool:
    """Whether an engine reaches a steady state that this package can compute."""
    return profile.scheduler not in _WITHOUT_FORM


# What a step consists of says what it takes, and the other way round; each round brings both
# about ten times closer together.
_NUM_ROUNDS = 4
# Numbers of requests that differ by less are the same.
_SAME_RATIO = 0.005


class TimesSteps(Protocol):
    """Says how long steps take, in µs as [variant, stage, step]: `StepTimes`."""

    def decode_us(self, num_decodes: Floats, raggedness: Floats, num_group: Floats) -> Floats:
        """Return the time of steps in which so many sequences decode."""

    def mixed_us(self, steps: MixedSteps) -> Floats:
        """Return the time of steps that compute prompts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SteadyState:
    """[variant, point] of replicas: times in µs, requests per s."""

    ttft_us: Floats
    tpot_us: Floats
    rate_rps: Floats


@dataclass(frozen=True, kw_only=True, slots=True)
class _Flow:
    """The steps of one batch, [variant, point].

    `per_step` requests are done in a step, of decoding where prompts have steps of their own. A
    step that computes prompts computes `piece_total` tokens of them in `prompt_us`, `beside`
    sequences decoding; `share` of all steps do, or where prompts have steps of their own so many
    for each step of decoding.
    """

    per_step: Floats
    piece_total: Floats
    concurrent_decodes: Floats
    prompt_us: Floats
    decode_us: Floats
    mean_us: Floats
    share: Floats


class _PrefillBatching(NamedTuple):
    """How many requests come while a step computes prompts, and how likely others wait then."""

    arriving: Floats
    busy: Floats


class ReplicaForm:
    """The closed form of replicas of one kind, at many concurrencies and step limits at once."""

    def __init__(self, times: TimesSteps, rules: EngineRules, load: LoadProfile) -> None:
        self._times, self._rules, self._load = times, rules, load
        self._prompt = max(load.prefill_mean, 1.0)
        # Steps, each of which yields several tokens of a sequence with drafts.
        self._answer = max(load.decode_mean - 1.0, 1e-9) / rules.tokens_per_step
        self._num_streams = rules.num_engines * rules.num_stages

    def aggregated(self, concurrency: Floats, budget: Floats) -> SteadyState:
        """Return the steady state of replicas that do all of a request.

        `concurrency` requests are on a replica at any time, all of them running; a step computes at
        most `budget` tokens.
        """
        inside, (num, away, flow) = self._settle_with_servers(concurrency, budget)
        ttft_us = self._ttft_us(num, away, flow)
        cycle_us = (self._answer + away) * flow.mean_us
        each_us = np.maximum(cycle_us - ttft_us, 0.0) / self._answer
        rate = self._rate(num, away, flow, inside)
        servers_us = self._frontend_us() + self._output_us(num)
        outside_us = np.maximum((concurrency - inside) / rate, servers_us)
        return SteadyState(
            ttft_us=ttft_us + outside_us,
            tpot_us=each_us / self._rules.tokens_per_step,
            rate_rps=rate * US_PER_S,
        )

    def prefill(self, concurrency: Floats, budget: Floats) -> PromptPasses:
        """Return replicas that only compute prompts, at most `concurrency` of them together."""
        num = np.broadcast_to(concurrency / self._num_streams, (NUM_VARIANTS, len(concurrency)))
        most = self._prompt_total(num, budget)
        alone = np.minimum(np.broadcast_to(budget, num.shape), self._prompt)
        single_us, latency_us = self._prompt_us(alone, np.zeros(num.shape))
        full_us, _ = self._prompt_us(most, np.zeros(num.shape))
        num_pieces = np.maximum(np.ceil(self._prompt / alone - 1e-9), 1.0)
        busy_us = self._frontend_busy_us()
        return PromptPasses(
            alone_us=num_pieces * latency_us + self._frontend_us(),
            single_us=np.maximum(single_us * self._prompt / alone / self._num_streams, busy_us),
            each_us=np.maximum(full_us * self._prompt / most / self._num_streams, busy_us),
            most=most / self._prompt,
        )

    def decode(self, concurrency: Floats) -> SteadyState:
        """Return replicas that only decode: `ttft_us` 0, rates of whole answers."""
        num = np.maximum(concurrency / self._num_streams, 1.0)
        num = np.broadcast_to(num, (NUM_VARIANTS, len(num)))
        # Before the same batch decodes again the others in flight are handed out too.
        output_us = self._rules.num_stages * self._output_us(num)
        step_us = np.maximum(self._decode_us(num), output_us)
        rate = np.minimum(concurrency, self._num_streams) * num / (step_us * self._answer)
        return SteadyState(
            ttft_us=np.zeros(num.shape),
            tpot_us=step_us / self._rules.tokens_per_step,
            rate_rps=rate * US_PER_S,
        )

    def aggregated_mix(self, concurrency: Floats, budget: Floats) -> StepMix:
        """Return the steps of replicas as `aggregated` takes them."""
        _, (_, _, flow) = self._settle_with_servers(concurrency, budget)
        decoding = 1.0 - flow.share[0] if self._rules.mixes else np.ones(len(concurrency))
        return StepMix(
            prompts=self._prompt_steps(flow.piece_total[0], flow.concurrent_decodes[0]),
            prompts_per_request=flow.share[0] / flow.per_step[0],
            decodes=self._decode_steps(np.maximum(flow.per_step[0] * self._answer, 1.0)),
            decodes_per_request=decoding / flow.per_step[0],
        )

    def prefill_mix(self, concurrency: Floats, budget: Floats) -> StepMix:
        """Return the steps of replicas as `prefill` takes them: none decodes."""
        total = self._prompt_total(concurrency / self._num_streams, budget)
        return StepMix(
            prompts=self._prompt_steps(total, np.zeros(len(total))),
            prompts_per_request=self._prompt / total,
            decodes=self._decode_steps(np.ones(len(total))),
            decodes_per_request=np.zeros(len(total)),
        )

    def decode_mix(self, concurrency: Floats) -> StepMix:
        """Return the steps of replicas as `decode` takes them: none computes prompts."""
        num = np.maximum(concurrency / self._num_streams, 1.0)
        return StepMix(
            prompts=self._prompt_steps(np.full(len(num), self._prompt), np.zeros(len(num))),
            prompts_per_request=np.zeros(len(num)),
            decodes=self._decode_steps(num),
            decodes_per_request=self._answer / num,
        )

    def _settle_with_servers(
        self, concurrency: Floats, budget: Floats
    ) -> tuple[Floats, tuple[Floats, Floats, _Flow]]:
        """Return how many requests the engines have, and as `_settle` does.

        What is in the front end or waits for the output server is not on them: the slowest server
        takes from the engines, or lets them have, what it can serve.
        """
        inside = np.broadcast_to(concurrency, (NUM_VARIANTS, len(concurrency)))
        settled = self._settle(inside, budget)
        request_us = max(self._token_us() * (self._answer + 1.0), self._frontend_busy_us())
        for _ in range(_NUM_ROUNDS):
            rate = self._rate(*settled, inside)
            others = concurrency / (1.0 + rate / inside * self._frontend_us())
            fewer = np.minimum(others, inside / np.maximum(rate * request_us, 1.0))
            if np.allclose(fewer, inside, rtol=_SAME_RATIO):
                break
            inside = fewer
            settled = self._settle(inside, budget)
        return inside, settled

    def _rate(self, num: Floats, away: Floats, flow: _Flow, inside: Floats) -> Floats:
        """Return the requests that are done in a µs."""
        rate: Floats = num / (self._answer + away) / flow.mean_us
        return rate * np.minimum(inside, self._num_streams)

    def _settle(self, concurrency: Floats, budget: Floats) -> tuple[Floats, Floats, _Flow]:
        """Return the requests of a batch, the steps they wait for others, and all steps."""
        # Engines in lock step and batches in flight share the requests.
        num = np.maximum(concurrency / self._num_streams, 1.0)
        num = np.broadcast_to(num, (NUM_VARIANTS, num.shape[-1]))
        budget = np.broadcast_to(budget, num.shape)
        away, batched = (
            np.ones(num.shape),
            _PrefillBatching(np.zeros(num.shape), np.zeros(num.shape)),
        )
        for _ in range(_NUM_ROUNDS):
            flow = self._flow(num, budget, num / (self._answer + away), batched)
            away = self._steps_away(num, budget, away)
            rate = num / (self._answer + away) / flow.mean_us
            arriving = rate * flow.prompt_us if self._rules.mixes else flow.per_step
            batched = _PrefillBatching(arriving, self._busy(num, budget, flow))
        return num, away, flow

    def _flow(
        self, num: Floats, budget: Floats, rate_per_step: Floats, batched: _PrefillBatching
    ) -> _Flow:
        """Return the steps where so many requests are done in a step."""
        rules = self._rules
        num_decodes = np.minimum(rate_per_step * self._answer, num)
        if rules.mixes:  # where all steps compute prompts, they leave room for no more
            num_decodes = np.minimum(
                num_decodes,
                budget * self._answer / (self._prompt + self._answer * rules.tokens_per_seq),
            )
        decode_us = self._decode_us(np.maximum(num_decodes, 1.0))
        room = self._room(num, budget, num_decodes)
        # Requests come one by one: those of one step are computed in the next.
        num_new = np.maximum(batched.arriving, 1e-9)
        piece = self._prompt / np.ceil(self._prompt / room)
        alone = np.minimum(room, piece * num_new / -np.expm1(-num_new))
        room = alone + (room - alone) * batched.busy
        # Those whose prompts a step computes do not decode in it.
        others = np.maximum(num - np.maximum(room / self._prompt, 1.0), 0.0)
        concurrent_decodes = np.minimum(num_decodes, others) if rules.mixes else np.zeros(num.shape)
        prompt_us, _ = self._prompt_us(room, concurrent_decodes)
        share = num_decodes / self._answer * self._prompt / room
        share = np.minimum(share, 1.0) if rules.mixes else share
        rest = 1.0 - share if rules.mixes else 1.0
        return _Flow(
            per_step=num_decodes / self._answer,
            piece_total=room,
            concurrent_decodes=concurrent_decodes,
            prompt_us=prompt_us,
            decode_us=decode_us,
            mean_us=share * prompt_us + rest * decode_us,
            share=share,
        )

    def _room(self, num: Floats, budget: Floats, num_decodes: Floats) -> Floats:
        """Return the most prompt tokens that a step computes."""
        rules = self._rules
        taken = num_decodes * rules.tokens_per_seq
        room = np.maximum(budget - taken, 1.0) if rules.mixes else budget
        if not rules.splits:
            room = self._whole(room)
        if rules.max_num_prefills:
            room = np.minimum(room, rules.max_num_prefills * self._prompt)
        return np.minimum(room, num * self._prompt)

    def _prompt_total(self, num: Floats, budget: Floats) -> Floats:
        """Return the prompt tokens of a step where nobody decodes."""
        total = np.minimum(budget, np.maximum(num, 1.0) * self._prompt)
        return total if self._rules.splits else self._whole(total)

    def _whole(self, room: Floats) -> Floats:
        """Return the tokens of whole prompts; a prompt longer than a step is computed in pieces."""
        return np.where(self._prompt <= room, np.floor(room / self._prompt) * self._prompt, room)

    def _steps_away(self, num: Floats, budget: Floats, away: Floats) -> Floats:
        """Return in how many steps of others a request gets no token but its first."""
        lag = self._lag(num)
        if not self._rules.mixes:
            # Prompts of one step have all been computed when the next of decoding comes.
            return lag
        own = lag + self._num_pieces(num, budget)
        return own + self._steps_waiting(num, budget, own, away)

    def _lag(self, num: Floats) -> Floats:
        """Return the steps already scheduled when a request comes: one if asynchronous."""
        return np.where(num > 1.0, float(self._rules.is_asynchronous), 0.0)

    def _num_pieces(self, num: Floats, budget: Floats) -> Floats:
        """Return the steps from the first in which a request is looked at to its first token."""
        room = self._room(num, budget, np.minimum(num, budget / 2))
        return np.maximum(np.ceil(self._prompt / room - 1e-9), 1.0)

    def _ttft_us(self, num: Floats, away: Floats, flow: _Flow) -> Floats:
        """Return the time to the first token from when the engine has a request."""
        lag = self._lag(num)
        if not self._rules.mixes:
            return self._ttft_apart_us(num, flow)
        ttft_us: Floats = (away - lag) * flow.prompt_us + lag * flow.mean_us
        return ttft_us

    def _ttft_apart_us(self, num: Floats, flow: _Flow) -> Floats:
        """Return the same where nobody decodes, or is done, while prompts are computed."""
        pieces = np.maximum(np.ceil(self._prompt / flow.piece_total - 1e-9), 1.0)
        # Others who are done in the same step, or were in the one before.
        others = flow.per_step * (num - 1.0) / num
        occupied = -np.expm1(-others)
        lag_us = occupied * flow.prompt_us + (1.0 - occupied) * flow.decode_us
        waiting = others / 2 * self._prompt / flow.piece_total
        return (pieces + waiting) * flow.prompt_us + self._lag(num) * lag_us

    def _steps_waiting(self, num: Floats, budget: Floats, own: Floats, away: Floats) -> Floats:
        """Return the steps in which only the prompts of others who came before are computed.

        A closed queue: a request that comes finds what another sees on average; of the one that is
        being computed the rest is left, by the spread of prompts half of it or more. The wait w
        with a service of s steps and Z steps elsewhere is the root of
        w (Z + s + w) = (n - 1) s (w + s (1 + cv^2) / 2).
        """
        one = self._prompt / self._room(num, budget, num * self._answer / (self._answer + away))
        linear = self._answer + own - (num - 1.0) * one
        constant = (num - 1.0) * one**2 * self._load.prefill_second_ratio / 2
        wait: Floats = (np.sqrt(linear**2 + 4.0 * constant) - linear) / 2
        return wait

    def _busy(self, num: Floats, budget: Floats, flow: _Flow) -> Floats:
        """Return how likely a request finds others' prompts uncomputed, its own left out."""
        room = self._room(num, budget, flow.per_step * self._answer)
        return np.minimum(flow.per_step * self._prompt / room, 1.0) * (num - 1.0) / num

    def _frontend_us(self) -> float:
        """Return what a front end takes for a request that comes alone."""
        rules = self._rules
        per_token_us = rules.frontend_us_per_token + rules.executor_us_per_token
        return rules.frontend_us + per_token_us * self._prompt

    def _frontend_busy_us(self) -> float:
        """Return how long a request keeps others out of the busier of a front end's servers."""
        rules = self._rules
        return max(rules.frontend_us_per_token, rules.executor_us_per_token) * self._prompt

    def _output_us(self, num: Floats) -> Floats:
        """Return how long the output server hands out a step of all engines in lock step."""
        return self._token_us() * num * self._rules.num_engines

    def _token_us(self) -> float:
        """Return how long the output server hands out one token of a request."""
        past_us = self._rules.output_us_per_past_token * self._load.past_tokens
        return self._rules.output_us_per_seq + past_us

    def _decode_us(self, num_decodes: Floats) -> Floats:
        """Return what a step of decoding takes until the next of the same batch."""
        stages = self._times.decode_us(*self._decode_steps(num_decodes.ravel()))
        return self._round_us(stages, num_decodes)[0]

    def _decode_steps(self, num_decodes: Floats) -> DecodeSteps:
        group = num_decodes * self._rules.tokens_per_seq * self._rules.num_engines
        return DecodeSteps(num_decodes, self._load.raggedness_of(num_decodes), group)

    def _prompt_us(self, piece_total: Floats, num_decodes: Floats) -> tuple[Floats, Floats]:
        """Return what a step with prompts takes, until the next, and through all stages."""
        steps = self._prompt_steps(piece_total.ravel(), num_decodes.ravel())
        num_seqs = num_decodes + piece_total / self._prompt
        round_us, through_us = self._round_us(self._times.mixed_us(steps), num_seqs)
        # The step waits for it: it is longer than the one that may still run.
        differ = self._load.prefill_second_ratio > 1.0
        compile_us = self._rules.compile_us if differ else 0.0
        return round_us + compile_us, through_us + compile_us

    def _prompt_steps(self, total: Floats, decodes: Floats) -> MixedSteps:
        piece = np.minimum(total, self._prompt)
        return MixedSteps(
            num_prefills=total / piece,
            piece_tokens=piece,
            piece_context=np.maximum(self._prompt - piece, 0.0) / 2,
            num_decodes=decodes,
            raggedness=self._load.raggedness_of(decodes),
            num_group_tokens=(total + decodes * self._rules.tokens_per_seq)
            * self._rules.num_engines,
        )

    def _round_us(self, stages_us: Floats, num_seqs: Floats) -> tuple[Floats, Floats]:
        """Return the time of a batch until it is scheduled again, and through all stages.

        `stages_us` is [variant, stage, variant x point]: of each variant its own entries count.
        """
        num_variants, num_points = num_seqs.shape
        shaped = stages_us.reshape(num_variants, -1, num_variants, num_points)
        own = np.arange(num_variants)
        stages = np.moveaxis(shaped[own, :, own], 1, 0)  # [stage, variant, point]
        rules = self._rules
        admitted = self._prompt * num_seqs / (self._answer + 1.0)
        host_us = rules.step_us + rules.step_us_per_seq * num_seqs
        host_us += rules.admission_us_per_token * admitted
        through_us = stages.sum(axis=0) + host_us
        if rules.is_asynchronous:
            return np.maximum(stages[0], host_us), through_us
        depth = rules.num_stages
        slowest_us = np.maximum(stages.max(axis=0), host_us if depth > 1 else 0.0)
        return np.maximum(through_us, depth * slowest_us), through_us
