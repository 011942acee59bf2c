"""InternEvo's question as a request, and the answer in its terms."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.frameworks.trainer import TrainerSpec
from foretoken.domain.models.architecture import ModelArchitecture
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.domain.requests.training_search import TrainingSearchRequest, TrainingSpace

TRAINER = "internevo"
# Of its configurations of 7B and 70B models. Source: InternEvo, `configs/7B_internlm2.py`.
SEQUENCE_LENGTH = 2048
# All that fit: more than a cluster of thousands of devices has.
_MAX_CANDIDATES = 100_000


def build_request(
    model: ModelArchitecture,
    device: str,
    *,
    world_size: int,
    global_batch_size: int,
    sequence_length: int = SEQUENCE_LENGTH,
    num_finalists: int = 5,
) -> TrainingSearchRequest:
    """Return the search over the points of InternEvo's simulator; its batch counts tokens.

    Raises:
        InvalidRequestError: the batch is no multiple of the sequence length.

    """
    if global_batch_size < sequence_length or global_batch_size % sequence_length:
        raise InvalidRequestError.of_field(
            "global_batch_size",
            f"{global_batch_size:,} tokens are no multiple of the sequence length,"
            f" {sequence_length:,}",
        )
    scenario = TrainingScenario(
        name=f"{TRAINER}-{model.name}",
        model=model,
        device=device,
        layout=ParallelLayout(dp=world_size),
        sequence_length=sequence_length,
        global_batch_size=global_batch_size // sequence_length,
        trainer=TrainerSpec(profile=TRAINER),
    )
    space = TrainingSpace(num_devices=(world_size,), enumeration=TRAINER)
    return TrainingSearchRequest(
        scenario=scenario,
        space=space,
        num_finalists=num_finalists,
        max_candidates=_MAX_CANDIDATES,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class InternEvoTerms:
    """A strategy as InternEvo's configuration says it.

    `algo` is `tensor.mode`, `pp` `pipeline.size`, `sp` `tensor.size`, `wp` `weight.size` and `zo`
    `zero1.size`; `micro_bsz` and `micro_num` stand in `data`, `ckpt` is `model.checkpoint`.
    """

    algo: str
    pp: int
    sp: int
    wp: int
    zo: int
    micro_bsz: int
    micro_num: int
    ckpt: bool

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> Self:
        """Return the terms of a row of `StrategyColumns`."""
        is_isp = row["weight_parallel"] == "isp"
        num_replicas = int(row["dp"]) * int(row["cp"])
        if is_isp:
            num_replicas = num_replicas * int(row["tp"]) // max(1, int(row["weight_degree"]))
        shards = int(row["shard_degree"]) or num_replicas
        return cls(
            algo=str(row["weight_parallel"]) or "mtp",
            pp=int(row["pp"]),
            sp=int(row["tp"]),
            wp=max(1, int(row["weight_degree"])) if is_isp else 1,
            zo=shards if row["zero_stage"] else 1,
            micro_bsz=int(row["micro_batch_size"]),
            micro_num=int(row["num_micro_batches"]),
            ckpt=row["recompute"] == "full",
        )
