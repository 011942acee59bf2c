"""What recurrences, hyper-connections and encoders compute, token by token and head by head."""

from collections.abc import Callable, Mapping

import torch

Results = tuple[torch.Tensor, ...]

# Three chunks of the longest kind, the last of them not full.
_TOKENS = {"num_seqs": 2, "num_tokens": 2 * 150}
_NEXT = {"num_seqs": 3, "num_tokens": 3 * 2}
_DELTA = {"num_k_heads": 2, "num_v_heads": 4, "head_k_dim": 8, "head_v_dim": 6}
_KDA = {"num_heads": 2, "head_dim": 8}
_MAMBA = {"num_heads": 4, "head_dim": 6, "num_groups": 2, "state_dim": 8}
_CHANNELS = {"channels": 5, "state_dim": 8}
_CONV = {"channels": 8, "kernel_size": 4}


def _delta_rule(
    log_decay_of: Callable[[torch.Tensor], torch.Tensor],
) -> Callable[..., Results]:
    """Return S <- a S, S <- S + b k (v - k^T S)^T, y = S^T q for each head and token."""

    def compute(*inputs: torch.Tensor) -> Results:
        query, key, value, decay, strength, state = inputs
        group = value.shape[2] // query.shape[2]
        output, state = torch.empty_like(value), state.clone()
        for seq in range(len(query)):
            for head in range(value.shape[2]):
                matrix = state[seq, head]
                for token in range(query.shape[1]):
                    q, k = (x[seq, token, head // group] for x in (query, key))
                    q, k = q / q.norm() / len(q) ** 0.5, k / k.norm()
                    matrix = matrix * log_decay_of(decay[seq, token, head]).exp().view(-1, 1)
                    learnt = value[seq, token, head] - k @ matrix
                    rate = 1 / (1 + (-strength[seq, token, head]).exp())
                    matrix = matrix + rate * torch.outer(k, learnt)
                    output[seq, token, head] = q @ matrix
                state[seq, head] = matrix
        return output, state

    return compute


def _log_sigmoid(x: torch.Tensor) -> torch.Tensor:
    return -(1 + (-x).exp()).log()


_gated = _delta_rule(_log_sigmoid)
_by_feature = _delta_rule(lambda x: -5 / (1 + (-x).exp()))


def _selective_scan(*inputs: torch.Tensor) -> Results:
    x, step, into, out, log_a, skip, state = inputs
    group = x.shape[2] // into.shape[2]
    output, state = torch.empty_like(x), state.clone()
    for seq in range(len(x)):
        for head in range(x.shape[2]):
            for token in range(x.shape[1]):
                width = (1 + step[seq, token, head].exp()).log()
                write, read = (m[seq, token, head // group] for m in (into, out))
                vector = x[seq, token, head]
                kept = (-width * log_a[head].exp()).exp() * state[seq, head]
                state[seq, head] = kept + torch.outer(write, width * vector)
                output[seq, token, head] = read @ state[seq, head] + skip[head] * vector
    return output, state


def _scan_channels(*inputs: torch.Tensor) -> Results:
    x, step, gate, into, out, log_a, skip, state = inputs
    output, state = torch.empty_like(x), state.clone()
    for seq in range(len(x)):
        for token in range(x.shape[1]):
            for channel in range(x.shape[2]):
                width = (1 + step[seq, token, channel].exp()).log()
                value, at = x[seq, token, channel], gate[seq, token, channel]
                kept = (-width * log_a[channel].exp()).exp() * state[seq, channel]
                state[seq, channel] = kept + width * value * into[seq, token]
                read = state[seq, channel] @ out[seq, token] + skip[channel] * value
                output[seq, token, channel] = read * at / (1 + (-at).exp())
    return output, state


def _conv(x: torch.Tensor, state: torch.Tensor, weight: torch.Tensor) -> Results:
    seen, width = torch.cat((state, x), dim=-1), weight.shape[-1]
    summed = sum(
        weight[:, 0, place].unsqueeze(-1) * seen[..., place : place + x.shape[-1]]
        for place in range(width)
    )
    return summed / (1 + (-summed).exp()), seen[..., -(width - 1) :]


def _before(residual: torch.Tensor, weights: torch.Tensor) -> Results:
    rows = []
    for streams in residual:
        wide = streams.flatten()
        normed = wide / (wide.square().mean() + 1e-6).sqrt()
        mixes = normed @ weights / len(wide) ** 0.5
        among = mixes[4:].view(2, 2).exp()
        for _ in range(5):
            among = among / among.sum(1, keepdim=True)
            among = among / among.sum(0, keepdim=True)
        gates = 1 / (1 + (-mixes[:4]).exp())
        rows.append((gates[0] * streams[0] + gates[1] * streams[1], 2 * gates[2:4], among))
    found = (torch.stack(parts) for parts in zip(*rows, strict=True))
    return tuple(found)


def _after(
    x: torch.Tensor, residual: torch.Tensor, after: torch.Tensor, among: torch.Tensor
) -> torch.Tensor:
    mixed = torch.einsum("tij,tjh->tih", among, residual)
    return mixed + torch.einsum("ti,th->tih", after, x)


def _encode(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    scores = torch.einsum("bhqd,bhkd->bhqk", query, key) / query.shape[-1] ** 0.5
    return torch.einsum("bhqk,bhkd->bhqd", scores.softmax(-1), value)


RECURRENCES: Mapping[str, tuple[Mapping[str, int], Callable[..., torch.Tensor | Results]]] = {
    "gated_delta_prefill": ({**_TOKENS, **_DELTA}, _gated),
    "gated_delta_decode": ({**_NEXT, **_DELTA}, _gated),
    "kda_prefill": ({**_TOKENS, **_KDA}, _by_feature),
    "kda_decode": ({**_NEXT, **_KDA}, _by_feature),
    "mamba2_prefill": ({**_TOKENS, **_MAMBA}, _selective_scan),
    "mamba2_decode": ({**_NEXT, **_MAMBA}, _selective_scan),
    "mamba_prefill": ({**_TOKENS, **_CHANNELS}, _scan_channels),
    "mamba_decode": ({**_NEXT, **_CHANNELS}, _scan_channels),
    "causal_conv_prefill": ({**_TOKENS, **_CONV}, _conv),
    "causal_conv_decode": ({**_NEXT, **_CONV}, _conv),
    "mhc_pre": ({"num_tokens": 5, "num_streams": 2, "hidden": 16, "sinkhorn_steps": 5}, _before),
    "mhc_post": ({"num_tokens": 5, "num_streams": 2, "hidden": 16}, _after),
    "encoder_attention": (
        {"num_seqs": 2, "num_tokens": 10, "score_pairs": 50, "num_heads": 3, "head_dim": 8},
        _encode,
    ),
}
