"""Where an all-reduce and the norm after it are one kernel: it is over small messages alone.

Each rank sums, adds the residual and normalises what it has in registers, so that the norm takes no
time of its own. Source: vLLM 0.20, compilation/passes/fusion/allreduce_rms_fusion.py
(`FI_ALLREDUCE_FUSION_MAX_SIZE_MB`) and config/vllm.py (`enable_allreduce_rms_fusion`: FlashInfer's
kernels, compute capability 9.0 and 10, neither data parallelism nor a pipeline).

Profiles leave it off: whether a server has the kernels, and its graph the pattern, is not known. 57
measured runs of gpt-oss under vLLM 0.18 on 2, 4 and 8 H200s are nearer without (TPOT 5.3 % off,
with it 8.2).
"""

from foretoken.domain.hardware.device import DeviceSpec
from foretoken.domain.requests.layout import ParallelLayout

# Largest message in MiB by architecture, then by ranks.
_LARGEST_MIB = {
    "hopper": {2: 64.0, 4: 2.0, 8: 0.5},
    "blackwell": {2: 64.0, 4: 32.0, 8: 1.0},
}
# Of compute capability 12, without the links that the kernels write through.
_WITHOUT = frozenset({"rtx_5090", "rtx_pro_6000"})


def find_fused_bytes(device: DeviceSpec, layout: ParallelLayout) -> float:
    """Return the largest message of a tensor-parallel sum that is one kernel with a norm; 0: none.

    Engines that share experts, and stages of a pipeline, run them apart.
    """
    if device.name in _WITHOUT or layout.dp > 1 or layout.pp > 1:
        return 0.0
    return _LARGEST_MIB.get(device.architecture, {}).get(layout.tp, 0.0) * 2**20
