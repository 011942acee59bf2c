"""The inputs of Mamba's kernels, and what they compute from them."""

from collections.abc import Callable, Mapping

import torch
from torch.nn import functional

from foretoken.profiler.attention.recurrence import zeros_of_state
from foretoken.profiler.kernel import Inputs, TensorFactory

# Tokens whose states are there at once.
CHUNK = 64


def make_inputs(dims: Mapping[str, int], tensors: TensorFactory) -> Inputs:
    """Return x, step, gate, B and C [seqs, tokens, ...], A and D by channel, and the state."""
    num_seqs, channels, width = dims["num_seqs"], dims["channels"], dims["state_dim"]
    length = dims["num_tokens"] // num_seqs
    return (
        *(tensors.random(num_seqs, length, channels) for _ in range(3)),
        *(tensors.random(num_seqs, length, width) for _ in range(2)),
        tensors.random(channels, width),
        tensors.random(channels),
        zeros_of_state(tensors, num_seqs, channels, width),
    )


def bind_scan(chunk: int) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Return the scan over chunks of so many tokens; states decay by e^(-step e^A)."""

    def run(*inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, step, gate, into, out, log_a, skip, state = inputs
        step = functional.softplus(step.float())
        rate = log_a.float().exp()
        outputs = []
        for start in range(0, x.shape[1], chunk):
            part = slice(start, start + chunk)
            width = step[:, part].unsqueeze(-1)
            written = width * x[:, part].unsqueeze(-1) * into[:, part].unsqueeze(2)
            states = _scan((-width * rate).exp(), written.float(), state)
            outputs.append(torch.einsum("stcn,stn->stc", states, out[:, part].float()))
            state = states[:, -1]
        output = torch.cat(outputs, 1) + x * skip.float()
        return (output * functional.silu(gate.float())).to(x.dtype), state

    return run


def _scan(kept: torch.Tensor, written: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """Return the states [seqs, tokens, ...] after each token, in a doubling number of steps."""
    reach = 1
    while reach < kept.shape[1]:
        earlier = functional.pad(written[:, :-reach], (0, 0, 0, 0, reach, 0))
        written = written + kept * earlier
        kept = kept * functional.pad(kept[:, :-reach], (0, 0, 0, 0, reach, 0), value=1.0)
        reach *= 2
    return written + kept * state.unsqueeze(1)
