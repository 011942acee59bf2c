"""What a closed form has to know of an engine: how its steps are put together."""

from dataclasses import dataclass

from foretoken.domain.frameworks.engine import EngineProfile
from foretoken.domain.requests.layout import ParallelLayout

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
    whole ones are computed. `num_engines` run in lock step; `num_stages` batches are in flight.
    """

    mixes: bool
    splits: bool
    is_asynchronous: bool
    num_engines: int
    num_stages: int
    max_num_prefills: int
    step_us: float
    step_us_per_seq: float
    frontend_us: float
    frontend_us_per_token: float


def closed_form_rules(profile: EngineProfile, layout: ParallelLayout) -> EngineRules:
    """Return the rules of an engine on a layout."""
    return EngineRules(
        mixes=profile.scheduler not in _PROMPTS_FIRST or profile.mixes_prefill,
        splits=profile.scheduler in _SPLITTING or profile.max_chunk_tokens > 0,
        is_asynchronous=profile.has_async_scheduling and layout.pp == 1,
        num_engines=layout.dp,
        num_stages=layout.pp,
        max_num_prefills=profile.max_num_prefills,
        step_us=profile.host_us + profile.output_us,
        step_us_per_seq=profile.host_us_per_seq + profile.output_us_per_seq,
        frontend_us=1000.0 * profile.frontend_ms,
        frontend_us_per_token=profile.frontend_us_per_token,
    )


def has_closed_form(profile: EngineProfile) -> bool:
    """Whether an engine reaches a steady state that this package can compute."""
    return profile.scheduler not in _WITHOUT_FORM
