"""Host time of experts in OpenAI's Triton kernels: the source of `expert_call_us` in `trtllm-1.0`.

Run: python tests/benchmarks/host_time_of_experts.py FOLDER (needs PyTorch, the extra `profiler`)

FOLDER has `triton` and `triton_kernels` as their wheels unpack: triton 3.5.0, and the second from
sgl-kernel 0.3.21. Experts are called as TensorRT-LLM does on Hopper (`_torch/modules/fused_moe/
fused_moe_triton.py`): weights in MXFP4, activations of 16 bit, 128 experts, four for each token.
No device is needed: kernels are neither compiled nor launched, so that all that is left is Python.
Prints the least processor time of a call, and of a launch with 19 arguments, whose time on servers
is known, and by that what a call takes there.
"""

import runpy
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

_TOKENS, _FEATURES, _EXPERTS, _TOP_K = 922, 256, 128, 4
_CALLS, _RUNS, _US_PER_S = 30, 60, 1e6
# A launch on a server with an H100 under Triton 3.5.0, and what of it is in the driver (us).
# Source: meta-pytorch/tritonbench, pull request 669.
_LAUNCH_US, _DRIVER_US = 13.18, 3.64
# What a Hopper says of itself.
_PROPERTIES = SimpleNamespace(
    multi_processor_count=132, shared_memory_per_block_optin=232_448, major=9, minor=0
)


class _Kernel:
    """What Triton takes for a compiled kernel; counts its launches."""

    function, packed_metadata, num_launches = 0, None, 0

    def launch_metadata(self, *_: Any) -> None:
        return None

    def run(self, *_: Any) -> None:
        _Kernel.num_launches += 1


class _Experts:
    """A layer's experts on one of `num_ranks`."""

    def __init__(self, num_ranks: int) -> None:
        self._num_local = _EXPERTS // num_ranks
        self._tokens = torch.zeros(_TOKENS, _FEATURES, dtype=torch.bfloat16)
        self._scores = torch.zeros(_TOKENS, _EXPERTS, dtype=torch.bfloat16)
        self._up = self._stored(2 * _FEATURES)
        self._down = self._stored(_FEATURES)

    def call(self) -> None:
        """Route tokens, multiply, and sum what experts return."""
        from triton_kernels.matmul_ogs import FnSpecs, FusedActivation, matmul_ogs
        from triton_kernels.swiglu import swiglu_fn

        routing, gather, scatter = self._route()
        weights, bias, precision = self._up
        specs = FnSpecs("swiglu", swiglu_fn, ("alpha", "limit"))
        hidden = matmul_ogs(
            torch.empty_like(self._tokens),
            weights,
            bias,
            routing,
            gather_indx=gather,
            precision_config=precision(),
            fused_activation=FusedActivation(specs, (1.702, 7.0), 2),
        )
        weights, bias, precision = self._down
        matmul_ogs(
            hidden,
            weights,
            bias,
            routing,
            scatter_indx=scatter,
            precision_config=precision(),
            gammas=routing.gate_scal,
        )

    def _route(self) -> Any:
        from triton_kernels.compaction import compaction
        from triton_kernels.routing import _routing_clear_bitmatrix, routing_from_bitmatrix
        from triton_kernels.topk import topk

        scales, experts, bits = topk(
            self._scores, _TOP_K, apply_softmax=True, y_indx=None, n_rows=None
        )
        if self._num_local < _EXPERTS:
            stored = bits.storage.data
            arguments = (stored, stored.stride(0), stored.stride(1), stored.shape[1])
            # TensorRT-LLM's own kernel shifts the rank's experts first; its arguments are as many.
            for _ in range(2):
                _routing_clear_bitmatrix[(_TOKENS,)](*arguments, self._num_local, BLOCK_N=512)
            scales, experts = compaction(scales, experts, bits)
            bits.shape[-1] = self._num_local
        return routing_from_bitmatrix(bits, scales, experts, self._num_local, _TOP_K)

    def _stored(self, num_outputs: int) -> tuple[Any, Tensor, Callable[[], Any]]:
        from triton_kernels.matmul_ogs import FlexCtx, PrecisionConfig
        from triton_kernels.tensor import FP4, convert_layout, wrap_torch_tensor
        from triton_kernels.tensor_details import layout

        shape = (self._num_local, num_outputs, _FEATURES // 2)
        weights = torch.zeros(shape, dtype=torch.uint8).transpose(1, 2)
        scales = torch.zeros(self._num_local, _FEATURES // 32, num_outputs, dtype=torch.uint8)
        of_weights, options = layout.make_default_matmul_mxfp4_w_layout(mx_axis=1)
        wrapped = convert_layout(wrap_torch_tensor(weights, dtype=FP4), of_weights, **options)
        of_scales, options = layout.make_default_matmul_mxfp4_w_scale_layout(mx_axis=1, num_warps=8)
        scale = convert_layout(wrap_torch_tensor(scales), of_scales, **options)
        return (
            wrapped,
            torch.zeros(self._num_local, num_outputs),
            lambda: PrecisionConfig(
                weight_scale=scale, flex_ctx=FlexCtx(), allow_tf32=False, out_dtype=torch.bfloat16
            ),
        )


def main() -> int:
    """Print the times."""
    if len(sys.argv) != 2 or not (Path(sys.argv[1]) / "triton_kernels").is_dir():
        sys.stdout.write(str(__doc__))
        return 2
    sys.path.insert(0, sys.argv[1])
    torch.set_num_threads(1)
    _pretend_hopper()
    for num_ranks in (1, 8):
        experts = _Experts(num_ranks)
        plain_us, call_us = _time_least(_launch_of_19(), experts.call)
        _Kernel.num_launches = 0
        experts.call()
        ratio, launches = call_us / plain_us, _Kernel.num_launches
        server_us = ratio * (_LAUNCH_US - _DRIVER_US) + launches * _DRIVER_US
        sys.stdout.write(
            f"experts on one of {num_ranks}: {call_us:.0f} us with {launches} launches, as long as"
            f" {ratio:.0f} with 19 arguments of {plain_us:.1f} us; on a server {server_us:.0f} us\n"
        )
    return 0


def _pretend_hopper() -> None:
    """Let Triton compile and launch for a device that is not there."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver, jit

    def keep_kernel(function: Any, key: str, _signature: Any, device: int, *_: Any) -> _Kernel:
        function.device_caches[device][0][key] = kernel = _Kernel()
        return kernel

    driver.set_active(
        SimpleNamespace(
            get_current_device=lambda: 0,
            get_current_stream=lambda _device: 0,
            get_current_target=lambda: GPUTarget("cuda", 90, 32),
            launcher_cls=None,
        )
    )
    for owner, name, answer in (
        (jit.JITFunction, "_do_compile", keep_kernel),
        (torch.cuda, "get_device_properties", lambda _device=0: _PROPERTIES),
        (torch.cuda, "get_device_capability", lambda _device=0: (9, 0)),
    ):
        setattr(owner, name, answer)


def _launch_of_19() -> Callable[[], object]:
    """Return a launch of five pointers, nine numbers and five constants."""
    values = ", ".join(f"value_{place}" for place in range(14))
    constants = ", ".join(f"constant_{place}: language.constexpr" for place in range(5))
    source = (
        "import triton\nfrom triton import language\n\n"
        f"@triton.jit\ndef nothing({values}, {constants}):\n    pass\n"
    )
    # Triton reads the source of its kernels from their file.
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plain_kernel.py"
        path.write_text(source)
        kernel = runpy.run_path(str(path))["nothing"]
        pointers = [torch.zeros(1) for _ in range(5)]
        arguments = (*pointers, *(1 for _ in range(9)), *(32 for _ in range(5)))
        kernel[(1,)](*arguments)
    return lambda: kernel[(1,)](*arguments)


def _time_least(*calls: Callable[[], object]) -> list[float]:
    """Return the least time of each, in turns."""
    least_s = [float("inf") for _ in calls]
    for _ in range(_RUNS):
        for place, call in enumerate(calls):
            call()
            start_s = time.thread_time()
            for _ in range(_CALLS):
                call()
            least_s[place] = min(least_s[place], (time.thread_time() - start_s) / _CALLS)
    return [_US_PER_S * each_s for each_s in least_s]


if __name__ == "__main__":
    sys.exit(main())
