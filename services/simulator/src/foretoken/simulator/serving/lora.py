"""LoRA adapters of a workload: which request uses which, and how long one takes to load."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from foretoken.domain.lowering.graph import BatchShape, RankContext
from foretoken.domain.lowering.lora import adapter_bytes, adapter_shares
from foretoken.domain.lowering.lower import lower_rank
from foretoken.domain.lowering.options import LoweringOptions
from foretoken.domain.requests.cluster import LoraSpec
from foretoken.domain.units import NS_PER_S
from foretoken.simulator.workload.request_plan import NONE, Ints, RequestPlan
from foretoken.simulator.workload.rng import named_stream


def assign_adapters(plan: RequestPlan, lora: LoraSpec | None, seed: int) -> RequestPlan:
    """Return the plan with the adapter of each request, drawn by popularity.

    Requests of a session ask for the same one. The KV cache of equal text under two adapters
    differs, so content that they shared has a name for each.
    """
    if lora is None:
        return plan
    sessions, session = np.unique(plan.stream, return_inverse=True)
    # By inversion: what one session draws does not depend on how many there are.
    bounds = np.cumsum(adapter_shares(lora))
    drawn = np.searchsorted(bounds, named_stream(seed, "lora").random(len(sessions)), "right")
    adapter = np.minimum(drawn, lora.num_adapters - 1)[session].astype(np.int64)
    prefix = np.where(
        plan.prefix_stream == NONE, NONE, plan.prefix_stream * lora.num_adapters + adapter
    )
    return replace(plan, adapter=adapter, prefix_stream=prefix, hashes=_hashes_apart(plan, adapter))


def adapter_load_ns(lora: LoraSpec, options: LoweringOptions, ranks: Sequence[RankContext]) -> int:
    """Return how long an adapter takes to load: that of the device which holds most of one.

    Devices load at the same time, each over its own link. `ranks` are one of every stage.

    Raises:
        InvalidRequestError: the layout does not fit the model.

    """
    held = max(adapter_bytes_of_rank(lora, options, rank) for rank in ranks)
    return round(held / lora.load_bytes_per_s * NS_PER_S)


def adapter_bytes_of_rank(lora: LoraSpec, options: LoweringOptions, rank: RankContext) -> float:
    """Return the bytes of one adapter on a rank."""
    one = BatchShape(num_tokens=1, num_output_rows=1, num_group_tokens=1)
    return adapter_bytes(lower_rank(one, replace(options, lora=lora), rank), lora)


def _hashes_apart(plan: RequestPlan, adapter: Ints) -> Ints:
    if len(plan.hashes) == 0:
        return plan.hashes
    owners = np.repeat(adapter, np.diff(plan.hash_offsets))
    pairs = np.stack((plan.hashes, owners))
    return np.unique(pairs, axis=1, return_inverse=True)[1].astype(np.int64).reshape(-1)
