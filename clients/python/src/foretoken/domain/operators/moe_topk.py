"""Choose the experts of every token from the router's logits."""

from collections.abc import Iterator, Mapping

from foretoken.domain.operators.spec.operator import Dim, Dims, OperatorSpec, Relation
from foretoken.domain.operators.spec.sweep import pick, powers_of_two
from foretoken.domain.units import Quantity

# A chosen expert's weight in fp32 and its number.
_CHOICE_BYTES = 4 + 4


def _logits(d: Dims) -> Quantity:
    return d["num_tokens"] * d["num_experts"]


def _moved_bytes(d: Dims, element_bytes: float) -> Quantity:
    return _logits(d) * element_bytes + d["num_tokens"] * d["top_k"] * _CHOICE_BYTES


def _sweep(quick: bool) -> Iterator[Mapping[str, int]]:
    # Mixtral, gpt-oss-20b, DeepSeek-V2-Lite, gpt-oss-120b, Qwen3-30B-A3B, DeepSeek-V3: config.json.
    models = ((8, 2), (32, 4), (64, 6), (128, 4), (128, 8), (256, 8))
    routers = models[:2] if quick else models
    for num_experts, top_k in routers:
        for num_tokens in pick(quick, (1, 32, 1024), powers_of_two(1, 32768)):
            yield {"num_tokens": num_tokens, "num_experts": num_experts, "top_k": top_k}


SPEC = OperatorSpec(
    name="moe_topk",
    summary="softmax over the experts, and the top-k of every token with weights that sum to 1",
    group="moe",
    dims=(
        Dim("num_tokens", "tokens routed"),
        Dim("num_experts", "experts to choose from"),
        Dim("top_k", "experts per token"),
    ),
    flops=lambda d, _: 5 * _logits(d),
    moved_bytes=_moved_bytes,
    features={"rows_per_sm": lambda d, num_sms: d["num_tokens"] / num_sms},
    relations=(Relation("top_k", "num_experts"),),
    sweep=_sweep,
    # Reads the probabilities and writes as many gradients.
    backward_work_ratio=2.0,
    # Probabilities in fp32, at least twice as wide as the logits.
    saved_elements=lambda d: 2 * _logits(d),
    proxy_operator=lambda d: ("softmax", {"num_rows": d["num_tokens"], "width": d["num_experts"]}),
)
