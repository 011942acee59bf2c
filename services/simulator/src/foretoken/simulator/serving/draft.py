"""The draft of a speculating engine: what it is, what its passes cost, where it cannot run."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from foretoken.domain.errors import FieldViolation, InvalidRequestError
from foretoken.domain.frameworks.engine import EngineProfile
from foretoken.domain.models.architecture import ModelArchitecture
from foretoken.domain.models.layer import LayerKind
from foretoken.domain.models.stack import stack_of, state_of
from foretoken.domain.requests.cluster import SpeculativeSpec
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.simulator.cluster.fleet import encoder_scenario, pool_scenarios
from foretoken.simulator.cost.latency_surfaces import surface_spec
from foretoken.simulator.cost.surface import SurfaceSpec
from foretoken.simulator.cost.tables import CostTables
from foretoken.simulator.grid import Floats
from foretoken.simulator.serving.record import StepRecord
from foretoken.simulator.serving.setup import DeploymentSetup
from foretoken.simulator.serving.speculation import draft_steps
from foretoken.simulator.serving.step_cost import StepAccount, SurfaceCost

# The group of time in which the draft runs.
DRAFT_GROUP = "draft"
# Whose rules say what a request with drafts takes of a step.
SPECULATING_SCHEDULERS = ("chunked_prefill", "sglang", "trtllm")


def draft_scenario(scenario: ServingScenario) -> ServingScenario | None:
    """Return the scenario of the draft on its own; None where proposals cost nothing.

    A draft model runs in the scenario's dtype, spread over the devices by tensor parallelism.
    Layers of the model are as its own, experts and all.
    """
    spec = scenario.speculative
    if spec is None or spec.method == "ngram":
        return None
    # What it drafts is text, whatever the prompt began with.
    workload = scenario.workload.without_media()
    alone = replace(scenario, speculative=None, lora=None, cluster=None, workload=workload)
    if spec.draft_model is None:
        return replace(alone, model=_last_layers(scenario.model, spec.num_draft_layers))
    layout = scenario.layout
    if not stack_of(spec.draft_model).experts:
        layout = ParallelLayout(tp=layout.tp)
    return replace(alone, model=spec.draft_model, layout=layout, quantization="")


def draft_surface_spec(scenario: ServingScenario, max_context: int) -> SurfaceSpec | None:
    """Return what the surfaces of a scenario's draft depend on.

    It proposes the likeliest token, which takes no sampler, and runs in graphs of the same sizes.
    """
    draft = draft_scenario(scenario)
    if draft is None:
        return None
    spec = surface_spec(draft, max_context)
    return replace(
        spec,
        options=replace(spec.options, has_sampler=False),
        graphs=surface_spec(scenario, max_context).graphs,
    )


def list_surface_specs(
    scenario: ServingScenario, max_context: int
) -> tuple[SurfaceSpec, SurfaceSpec | None]:
    """Return what the surfaces of one pool's scenario depend on, and those of its draft if any."""
    return surface_spec(scenario, max_context), draft_surface_spec(scenario, max_context)


def encoder_surface_spec(scenario: ServingScenario, max_context: int) -> SurfaceSpec | None:
    """Return what the surfaces of replicas that encode images apart depend on; None without any."""
    encoder = encoder_scenario(scenario)
    return surface_spec(encoder, max_context) if encoder else None


def list_all_specs(scenario: ServingScenario, max_context: int) -> list[SurfaceSpec]:
    """Return what all surfaces of a deployment depend on, one each."""
    found = [
        spec for pool in pool_scenarios(scenario) for spec in list_surface_specs(pool, max_context)
    ]
    found.append(encoder_surface_spec(scenario, max_context))
    return list(dict.fromkeys(spec for spec in found if spec is not None))


def follow_speculation(engine: EngineProfile, spec: SpeculativeSpec | None) -> EngineProfile:
    """Return the rules of an engine that speculates as the specification says.

    Proposals from the text need the tokens on the host, so nothing is scheduled before they are
    there. Source: vLLM 0.20, config/vllm.py.
    """
    if spec is None or spec.method != "ngram":
        return engine
    return replace(engine, has_async_scheduling=False)


def check_speculation(scenario: ServingScenario) -> None:
    """Refuse engines whose speculation is not simulated; `scenario` is that of one pool.

    Raises:
        InvalidRequestError: the message says what works.
        UnknownPluginError: no such engine.

    """
    if violations := list_speculation_lacks(scenario):
        raise InvalidRequestError.of_violations(violations, "speculative decoding")


def list_speculation_lacks(scenario: ServingScenario) -> list[FieldViolation]:
    """Return what keeps the speculation of one pool from being simulated."""
    spec = scenario.speculative
    if spec is None:
        return []
    engine, layout = scenario.resolve_engine(), scenario.layout
    has_draft = spec.method != "ngram"
    checks: Mapping[str, tuple[bool, str]] = {
        "engine.profile": (
            engine.scheduler in SPECULATING_SCHEDULERS,
            f"{engine.name} does not speculate; take vllm-0.28, sglang-0.5 or trtllm-1.0",
        ),
        "speculative.num_draft_tokens": (
            spec.num_draft_tokens < engine.max_num_batched_tokens,
            f"must be below max_num_batched_tokens ({engine.max_num_batched_tokens})",
        ),
        "engine.rules.ffn_devices": (
            engine.ffn_devices == 0,
            "must be 0: engines that speculate have no experts apart",
        ),
        "layout.pp": (
            layout.pp == 1 or not has_draft,
            "must be 1 with a draft; the method ngram works on several stages",
        ),
    }
    return [
        FieldViolation(name, problem)
        for name, (is_legal, problem) in checks.items()
        if not is_legal
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftedCost:
    """The cost of steps that have the passes of a draft in them; its time is a group of its own."""

    target: SurfaceCost
    draft: SurfaceCost
    num_draft_tokens: int

    @property
    def tables(self) -> CostTables:
        """What a step costs without the draft."""
        return self.target.tables

    @property
    def num_stages(self) -> int:
        """Pipeline stages of an engine."""
        return self.target.num_stages

    def account(self, steps: StepRecord) -> StepAccount:
        """Return where the time of these steps goes and what it rests on."""
        own = self.target.account(steps)
        drafts = [self.draft.account(each) for each in self._passes(steps)]
        busy_s = sum(each.busy_s for each in drafts)
        first, *others = own.stage_busy_s
        return StepAccount(
            time_s_by_group={**own.time_s_by_group, DRAFT_GROUP: busy_s},
            time_s_by_provenance={
                name: time_s + sum(each.time_s_by_provenance[name] for each in drafts)
                for name, time_s in own.time_s_by_provenance.items()
            },
            low_s=own.low_s + sum(each.low_s for each in drafts),
            high_s=own.high_s + sum(each.high_s for each in drafts),
            stage_busy_s=(first + busy_s, *others),
        )

    def breakdown(self, steps: StepRecord) -> Mapping[str, Floats]:
        """Return the time of each step in µs by operator group, the draft's as one."""
        passes = [self.draft.breakdown(each) for each in self._passes(steps)]
        draft_us = np.sum([group for each in passes for group in each.values()], axis=0)
        return {**self.target.breakdown(steps), DRAFT_GROUP: draft_us}

    def _passes(self, steps: StepRecord) -> Iterator[StepRecord]:
        return draft_steps(steps, self.num_draft_tokens)


StepCosts: TypeAlias = SurfaceCost | DraftedCost


def add_draft_cost(
    cost: SurfaceCost, draft: SurfaceCost | None, spec: SpeculativeSpec | None
) -> StepCosts:
    """Return the cost of an engine's steps with those of its draft, if it has one."""
    if draft is None or spec is None:
        return cost
    return DraftedCost(target=cost, draft=draft, num_draft_tokens=spec.num_draft_tokens)


def time_drafts(setup: DeploymentSetup, cost: StepCosts) -> DeploymentSetup:
    """Return engines that know how long their draft takes."""
    if setup.speculation is None or not isinstance(cost, DraftedCost):
        return setup
    return replace(setup, speculation=replace(setup.speculation, draft=cost.draft.tables))


def _last_layers(model: ModelArchitecture, num_layers: int) -> ModelArchitecture:
    """Return layers like a model's last ones, which see all tokens, with its head."""
    name = f"{model.name} draft layers"
    if model.layers:
        stack = stack_of(model)
        seeing = [part for part in stack.mixers if not state_of(part).window_tokens]
        keeping = [part for part in seeing if state_of(part).token_elements] or list(stack.mixers)
        half = list(stack.feed_forwards)[-1]
        layer = LayerKind(name="draft", mixer=keeping[-1], feed_forward=half)
        return replace(
            model,
            name=name,
            num_layers=0,
            layers=(layer,),
            pattern=f"{num_layers}*draft",
            extras=(),
            aliases=(),
        )
    moe = replace(model.moe, num_dense_layers=0) if model.moe else None
    return replace(
        model,
        name=name,
        num_layers=num_layers,
        extras=(),
        moe=moe,
        sliding_window=0,
        full_attention_period=0,
        aliases=(),
    )
