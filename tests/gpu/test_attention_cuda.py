"""Attention on a CUDA device: every library present computes the definition, and is what ran."""

from collections.abc import Mapping

import pytest
import torch
from attention_reference import attend_one, outputs_of, relative_error, sequences_of
from torch.profiler import ProfilerActivity, profile

from foretoken.domain.measurements.estimate import DType, Phase
from foretoken.domain.operators.attention_prefill import prefill_dims, unequal_prefill_dims
from foretoken.domain.operators.attention_prefill_window import window_prefill_dims
from foretoken.profiler.attention.batch import (
    ReadCase,
    read_decode,
    read_latent_prefill,
    read_mixed,
    read_prefill,
    read_window_decode,
)
from foretoken.profiler.attention.ragged import Batch
from foretoken.profiler.kernel import TORCH_DTYPES, Kernel, TensorFactory, find_kernels

if not torch.cuda.is_available():
    pytest.skip("no CUDA device on this machine", allow_module_level=True)
pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
HEADS = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 128}
UNGROUPED = {**HEADS, "num_kv_heads": 8}
LATENT = {"num_heads": 4, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
MIXED_DECODES = {"num_decode_seqs": 3, "decode_kv_tokens": 300, "decode_kv_tokens_max": 200}
DECODE = {"num_seqs": 4, "kv_tokens": 400, "kv_tokens_max": 100}
RAGGED_DECODE = {"num_seqs": 4, "kv_tokens": 700, "kv_tokens_max": 400}
WINDOW = window_prefill_dims(1, 200, 37)
PROMPTS = Batch((20, 180), (20, 200))
RAGGED_WINDOW = {
    "num_seqs": 2,
    "q_tokens": 200,
    "kv_tokens": 220,
    "score_pairs": PROMPTS.score_pairs(37),
    "window": 37,
}

BATCHES: list[tuple[str, ReadCase, Mapping[str, int]]] = [
    ("attention_prefill", read_prefill, {**prefill_dims(2, 96, 0), **HEADS}),
    ("attention_prefill", read_prefill, {**prefill_dims(2, 40, 56), **UNGROUPED}),
    ("attention_prefill", read_prefill, {**unequal_prefill_dims(4, 64, 0), **HEADS}),
    ("attention_prefill", read_prefill, {**unequal_prefill_dims(4, 64, 80), **UNGROUPED}),
    ("attention_prefill_window", read_prefill, {**WINDOW, **HEADS}),
    ("attention_prefill_window", read_prefill, {**RAGGED_WINDOW, **HEADS}),
    ("attention_decode", read_decode, {**DECODE, **HEADS}),
    ("attention_decode", read_decode, {**RAGGED_DECODE, **HEADS}),
    ("attention_decode", read_decode, {**RAGGED_DECODE, **UNGROUPED}),
    (
        "attention_decode_window",
        read_window_decode,
        {**RAGGED_DECODE, "visible_tokens": 250, "window": 100, **HEADS},
    ),
    ("attention_mixed", read_mixed, {**prefill_dims(1, 64, 32), **MIXED_DECODES, **HEADS}),
    ("attention_mixed", read_mixed, {**unequal_prefill_dims(4, 64, 0), **MIXED_DECODES, **HEADS}),
    ("mla_prefill", read_latent_prefill, {**prefill_dims(2, 64, 0), **LATENT}),
    ("mla_prefill", read_latent_prefill, {**unequal_prefill_dims(4, 64, 80), **LATENT}),
]
# Rounding of the format, of scores and weights in it; of an fp8 cache the values are taken as read.
TOLERANCES = {DType.FP32: 2e-3, DType.FP16: 5e-3, DType.BF16: 3e-2}
FP8_QUERIES_TOLERANCE = 0.1
# What the device kernels of a source are called, any of them.
KERNEL_NAMES = {
    "flash_attn_interface": ("flash",),
    "flash_attn.": ("flash",),
    "_flash_attention_forward": ("flash",),
    "varlen_attn": ("flash",),
    "flashinfer": ("flashinfer", "batchprefill", "batchdecode", "prefill", "decode"),
    "attention, flash": ("flash",),
    "attention, cudnn": ("cudnn",),
    "attention, efficient": ("fmha", "efficient"),
    "attention, math": ("softmax",),
}


def _present(operator: str, dims: Mapping[str, int], phase: Phase) -> list[tuple[Kernel, DType]]:
    return [
        (kernel, dtype)
        for dtype in TOLERANCES
        for kernel in find_kernels(operator, dtype, phase, CUDA)
        if kernel.can_run(dims) and _is_taken(kernel, dims, dtype)
    ]


def _is_taken(kernel: Kernel, dims: Mapping[str, int], dtype: DType) -> bool:
    """Return whether it runs here: a backend of torch may take a shape on other devices only."""
    try:
        with torch.no_grad():
            kernel.bind(dims)(*kernel.make_inputs(dims, _tensors(dtype)))
    except RuntimeError as err:
        if "No available kernel" in str(err):
            return False
        raise
    return True


def _tolerance(kernel: Kernel, dtype: DType) -> float:
    return FP8_QUERIES_TOLERANCE if "fp8 queries" in kernel.source else TOLERANCES[dtype]


def _tensors(dtype: DType) -> TensorFactory:
    return TensorFactory(CUDA, TORCH_DTYPES[dtype], seed=1)


@pytest.mark.parametrize(("operator", "read", "dims"), BATCHES)
def test_every_library_attends_as_defined(
    operator: str, read: ReadCase, dims: Mapping[str, int]
) -> None:
    present = _present(operator, dims, Phase.FORWARD)
    assert present
    case = read(dims)
    off = {}
    for kernel, dtype in present:
        inputs = kernel.make_inputs(dims, _tensors(dtype))
        with torch.no_grad():
            actual = outputs_of(case, kernel.bind(dims)(*inputs))
        expected = [attend_one(one, case.window) for one in sequences_of(case, inputs)]
        error = relative_error(expected, actual)
        if error > _tolerance(kernel, dtype):
            off[kernel.source, dtype] = error
    assert off == {}


@pytest.mark.parametrize(
    ("operator", "read", "dims"),
    [batch for batch in BATCHES if batch[0] in ("attention_prefill", "mla_prefill")],
)
def test_every_library_has_the_gradients_of_the_definition(
    operator: str, read: ReadCase, dims: Mapping[str, int]
) -> None:
    present = _present(operator, dims, Phase.BACKWARD)
    assert present
    case = read(dims)
    off = {}
    for kernel, dtype in present:
        inputs = kernel.make_inputs(dims, _tensors(dtype))
        leaves = [inputs[position].requires_grad_() for position in kernel.differentiable]
        actual = outputs_of(case, kernel.bind(dims)(*inputs))
        expected = [attend_one(one, case.window) for one in sequences_of(case, inputs)]
        directions = [torch.randn_like(one) for one in expected]
        gradients = [
            torch.autograd.grad(
                torch.stack(
                    [(one.double() * to).sum() for one, to in zip(outs, directions, strict=True)]
                ).sum(),
                leaves,
            )
            for outs in (expected, actual)
        ]
        wanted = [gradient.double() for gradient in gradients[0]]
        error = relative_error(wanted, list(gradients[1]))
        if error > 2 * _tolerance(kernel, dtype):
            off[kernel.source, dtype] = error
    assert off == {}


@pytest.mark.parametrize(("operator", "read", "dims"), BATCHES)
def test_the_kernel_that_runs_is_the_one_named(
    operator: str, read: ReadCase, dims: Mapping[str, int]
) -> None:
    assert read(dims).batches
    wrong = {}
    for kernel, dtype in _present(operator, dims, Phase.FORWARD):
        wanted = [names for part, names in KERNEL_NAMES.items() if part in kernel.source]
        if not wanted:
            continue
        inputs, run = kernel.make_inputs(dims, _tensors(dtype)), kernel.bind(dims)
        with torch.no_grad():
            run(*inputs)
            with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
                run(*inputs)
                torch.cuda.synchronize()
        ran = [
            event.key.lower()
            for event in seen.key_averages()
            if str(event.device_type).endswith("CUDA")
        ]
        if not any(name in key for key in ran for name in wanted[0]):
            wrong[kernel.source] = ran
    assert wrong == {}


@pytest.mark.parametrize("dtype", [DType.FP16, DType.BF16])
def test_torch_alone_runs_ragged_batches_in_one_kernel(dtype: DType) -> None:
    """The default of a ragged batch is not one call per sequence."""
    for operator, _, dims in BATCHES:
        kernels = [
            kernel
            for kernel in find_kernels(operator, dtype, Phase.FORWARD, CUDA)
            if kernel.can_run(dims)
        ]
        assert "per sequence" not in kernels[0].source


@pytest.mark.parametrize("kv_tokens_max", [100, 200])
def test_latent_decodes_agree(kv_tokens_max: int) -> None:
    """Products, padded or not, and FlashInfer's kernel: each against its own inputs."""
    dims = {
        "num_seqs": 4,
        "kv_tokens": 400,
        "kv_tokens_max": kv_tokens_max,
        "num_heads": 16,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
    }
    kv_lens = read_decode({**dims, **HEADS}).joined.kv_lens
    present = _present("mla_decode", dims, Phase.FORWARD)
    assert present
    for kernel, dtype in present:
        # Scaled, as the kernels take them: else the softmax is all on one key.
        inputs = list(kernel.make_inputs(dims, _tensors(dtype)))
        inputs[0] = inputs[0] / 24
        if kernel.source.startswith("flashinfer"):
            inputs[1] = inputs[1] / 24
            queries = torch.cat(inputs[:2], dim=-1)
            pages = torch.cat(inputs[2:4], dim=-1)
            contexts = [
                pages[inputs[5][inputs[4][row] : inputs[4][row + 1]].long()].flatten(0, 1)
                for row in range(len(kv_lens))
            ]
        else:
            queries, cache = inputs[:2]
            contexts = list(cache.unbind() if cache.dim() == 3 else cache.split(kv_lens))
        expected = [
            (query.double() @ context[:kv_len].double().T).softmax(-1)
            @ context[:kv_len, :512].double()
            for query, context, kv_len in zip(queries, contexts, kv_lens, strict=True)
        ]
        with torch.no_grad():
            attended = list(kernel.bind(dims)(*inputs))
        assert (kernel.source, True) == (
            kernel.source,
            relative_error(expected, attended) <= TOLERANCES[dtype],
        )
