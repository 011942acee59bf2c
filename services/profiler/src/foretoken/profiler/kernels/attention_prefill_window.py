"""Causal attention of new tokens over a sliding window, with all sequences of equal length."""

from collections.abc import Callable, Mapping

import torch

from foretoken.profiler.attention import attend, attention_inputs, split_evenly
from foretoken.profiler.kernel import Inputs, Kernel, TensorFactory


def _make_inputs(dims: Mapping[str, int], tensors: TensorFactory) -> Inputs:
    q_len = split_evenly(dims["q_tokens"], dims["num_seqs"])
    kv_len = split_evenly(dims["kv_tokens"], dims["num_seqs"])
    *vectors, _ = attention_inputs(dims, dims["num_seqs"], (q_len, kv_len), tensors)
    if tensors.device.type == "cuda":
        return tuple(vectors)
    return *vectors, _window_mask(q_len, kv_len, dims["window"])


def _window_mask(q_len: int, kv_len: int, window: int) -> torch.Tensor:
    """Return which keys each query sees; queries are the last positions of their context."""
    offset = kv_len - q_len
    causal = torch.ones(q_len, kv_len, dtype=torch.bool).tril(offset)
    return causal.triu(offset - window + 1)


def _bind(dims: Mapping[str, int]) -> Callable[..., torch.Tensor]:
    window = dims["window"]

    def run(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *mask: torch.Tensor
    ) -> torch.Tensor:
        if mask:
            return attend(query, key, value, *mask)
        return _attend_in_window(query, key, value, window)

    return run


def _attend_in_window(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int
) -> torch.Tensor:
    """Return what the flash kernel computes; unlike a mask, its window skips blocks of keys."""
    attended, *_ = torch.ops.aten._flash_attention_forward(  # noqa: SLF001 - no public name has it
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        None,
        None,
        query.shape[2],
        key.shape[2],
        0.0,
        False,
        False,
        window_size_left=window - 1,
        window_size_right=0,
    )
    return attended.transpose(1, 2)


KERNEL = Kernel(
    operator="attention_prefill_window",
    source="torch flash attention with a window (CUDA), with a mask (CPU)",
    make_inputs=_make_inputs,
    bind=_bind,
)
