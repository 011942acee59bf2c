"""Which compiled function stands for which scheduler."""

from collections.abc import Mapping

from foretoken.simulator.jit import Addressed
from foretoken.simulator.serving.fast import (
    chunked_prefill,
    lightllm,
    orca,
    sarathi,
    sglang,
    static_batch,
    trtllm,
    vllm_v0,
)
from foretoken.simulator.serving.fast.layout import State

SELECTS: Mapping[str, Addressed[[State, int], int]] = {
    "chunked_prefill": chunked_prefill.select,
    "lightllm": lightllm.select,
    "orca": orca.select,
    "sarathi": sarathi.select,
    "sglang": sglang.select,
    "static_batch": static_batch.select,
    "trtllm": trtllm.select,
    "vllm_v0": vllm_v0.select,
}
