"""What calls take at least that carry more bytes than the caches hold, where nobody measured them.

Other operators and devices may tell of small calls, which lie in a cache, or of kernels that were
given fewer bytes; none of that makes a memory faster than its data sheet.
"""

from dataclasses import replace

import numpy as np

from foretoken.domain.measurements.estimate import LatencyColumns, Provenance
from foretoken.domain.operators.spec.variant import parse_variant
from foretoken.domain.units import US_PER_S
from foretoken.predictor.features import Design
from foretoken.predictor.query_columns import Call
from foretoken.predictor.trainer import MIN_ROOFLINE_RATIO

# How many bytes experts are depends on which of them tokens go to. Source: the tables below have
# experts in BF16 and FP8 at 0.6 to 1 times the bytes that are counted for them, one call in 25.
_DRAWN_GROUP = "moe"
# A variant that is a part of an operator's work moves a part of its bytes.
_PART = "part"
# Where bytes fill the cache just once, calls take at least so much of their time. Source: calls
# that move more than twice the cache, NVIDIA's tables of an H200 (of 70,607 GEMMs none is below
# 1.10, of 35,547 decode attentions over keys in their own format none below 1.01; TensorRT-LLM's
# gated delta rule is at 0.90), Vidur's and GPUModeling's of A30, A100 and H100 (of 12,000 sums,
# norms, activations, rotary embeddings, softmaxes, masks and embeddings none is below 0.98; those
# of once to twice the cache are at 0.94). A GH200 under PyTorch alone has calls below, 1 % of GELU
# and a tenth of embeddings and masks, at half of what the others of the same size take there.
_LEAST_RATIO = 0.95
_FROM_ELSEWHERE = (Provenance.TRANSFERRED.value, Provenance.ANALYTICAL.value)


def hold_to_bandwidth(call: Call, design: Design, found: LatencyColumns) -> LatencyColumns:
    """Return estimates of which none is faster than the device's memory carries its bytes.

    A call that fits into the last cache may be, down to the least share of any roofline.
    """
    device = call.target.device
    is_part = _PART in parse_variant(call.table.variant)
    if device.kind != "gpu" or call.spec.group == _DRAWN_GROUP or is_part:
        return found
    memory_us = call.read_ratio * design.memory_us
    moved_bytes = memory_us * device.memory_bandwidth_bytes_per_s / US_PER_S
    least_us = memory_us * np.clip(moved_bytes / device.l2_cache_bytes, MIN_ROOFLINE_RATIO, 1.0)
    least_us = np.where(np.isin(found.provenance, _FROM_ELSEWHERE), least_us, 0.0)
    latency_us = np.maximum(found.latency_us, least_us)
    return replace(
        found,
        latency_us=latency_us,
        low_us=np.maximum(found.low_us, _LEAST_RATIO * least_us),
        high_us=np.maximum(found.high_us, latency_us),
    )
