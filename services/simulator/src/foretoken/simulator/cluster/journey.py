"""A request on its way through a cluster."""

import enum
from dataclasses import dataclass

from foretoken.simulator.cluster.kv_network import Transfer
from foretoken.simulator.serving.record import NOT_REACHED


class Stage(enum.Enum):
    """Where a request is."""

    AWAY = "not sent, in the frontend, or done"
    AT_ROUTER = "waits for a replica that takes it"
    ON_ENGINE = "on the engine that computes its prompt"
    PREFILLED = "waits for a decode replica that takes it"
    WITHOUT_ROOM = "waits for KV blocks of its decode engine"
    MOVING = "its KV cache moves there"
    DECODING = "on the engine that computes the rest of its answer"


@dataclass(slots=True)
class Journey:
    """A request: where it is, and what the record says of its way; engines count through all pools.

    `first_engine` computes its prompt, `engine` its answer. `try_number` counts its tries: what was
    planned in one that failed does not happen.
    """

    index: int
    priority: int
    stage: Stage = Stage.AWAY
    try_number: int = 0
    arrival_ns: int = NOT_REACHED
    prefilled_ns: int = NOT_REACHED
    transferred_ns: int = NOT_REACHED
    first_engine: int = NOT_REACHED
    engine: int = NOT_REACHED
    outcome: int = 0
    transfer: Transfer | None = None
