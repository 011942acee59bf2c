"""What a deployment is: engines that are alike, and how requests are spread over them."""

from dataclasses import dataclass

from foretoken.domain.frameworks.engine import EngineProfile
from foretoken.domain.frameworks.kv_tier import KvTier
from foretoken.simulator.serving.compiled_kernels import CompiledKernels
from foretoken.simulator.serving.speculation import Speculation


@dataclass(frozen=True, kw_only=True, slots=True)
class DeploymentSetup:
    """Engines that are alike, `num_kv_blocks` of each, and how requests are spread over them.

    Engines in lock step (data-parallel attention) schedule together, and the slowest sets the pace.
    Before a step with prompts the host compiles what it needs of `kernels` and is not there yet.
    A request of more than `max_context` tokens, prompt and answer, is refused. Without
    `speculation` a step computes one token of a request.
    """

    profile: EngineProfile
    num_kv_blocks: int
    num_engines: int = 1
    is_lock_step: bool = False
    router: str = "round_robin"
    max_context: int = 2**31 - 1
    kv_bytes_per_token: int = 0
    kv_tiers: tuple[KvTier, ...] = ()
    speculation: Speculation | None = None
    kernels: CompiledKernels | None = None
