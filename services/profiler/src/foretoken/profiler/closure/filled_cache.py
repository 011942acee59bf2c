"""A key-value cache that is full but for the token a decoding step writes.

As in a serving engine the step writes one token into memory that is there already: a cache of
`transformers` that grows would copy everything it holds at each step.
"""

from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer


class FilledLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values of one layer, `[batch, heads, num_tokens + 1, features]`, random."""

    def __init__(self, num_tokens: int, generator: torch.Generator) -> None:
        """Hold `num_tokens` of each sequence, drawn when the first step says their shape."""
        super().__init__()
        self._num_tokens = num_tokens
        self._generator = generator
        self._place = torch.empty(0)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Fill the cache with random values."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys = self._fill(key_states)
        self.values = self._fill(value_states)
        self._place = torch.tensor([self._num_tokens], device=self.device)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new token after the others, and return all."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys.index_copy_(2, self._place, key_states)
        self.values.index_copy_(2, self._place, value_states)
        return self.keys, self.values

    def get_seq_length(self, *_args: Any) -> int:
        """Return the tokens before the new one."""
        return self._num_tokens

    def _fill(self, states: torch.Tensor) -> torch.Tensor:
        batch, heads, _, width = states.shape
        shape = (batch, heads, self._num_tokens + 1, width)
        filled = torch.empty(shape, dtype=self.dtype, device=self.device)
        # One sequence is drawn, all have it: drawing gigabytes would take longer than the step.
        filled[:1].normal_(generator=self._generator)
        if batch > 1:
            filled[1:].copy_(filled[:1].expand(batch - 1, -1, -1, -1))
        return filled


def make_filled_cache(num_layers: int, num_tokens: int, device: torch.device, seed: int) -> Cache:
    """Return a cache of `num_tokens` random tokens in each sequence of any batch."""
    generator = torch.Generator(device=device).manual_seed(seed)
    return Cache(layers=[FilledLayer(num_tokens, generator) for _ in range(num_layers)])
