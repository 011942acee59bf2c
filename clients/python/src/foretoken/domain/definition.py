"""Names that requests can use, by kind, and what each stands for."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from foretoken.domain import schema
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.frameworks.engine import all_engines
from foretoken.domain.frameworks.trainer import all_trainers
from foretoken.domain.hardware.device import all_devices
from foretoken.domain.hardware.price import all_price_lists
from foretoken.domain.hardware.topology import all_topologies
from foretoken.domain.models.architecture import all_models
from foretoken.domain.requests.dataset import all_datasets

_KINDS: Mapping[str, Callable[[], Mapping[str, Any]]] = {
    "models": all_models,
    "devices": all_devices,
    "topologies": all_topologies,
    "engines": all_engines,
    "trainers": all_trainers,
    "price_lists": all_price_lists,
    "datasets": all_datasets,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Definition:
    """A name, what it is in a line, and what it stands for as JSON with the keys of its file."""

    name: str
    description: str = ""
    content_json: str = ""


def list_definitions(kind: str) -> tuple[Definition, ...]:
    """Return the names of a kind in their order.

    Raises:
        InvalidRequestError: there is no such kind.

    """
    if kind not in _KINDS:
        raise InvalidRequestError.of_field("kind", f"is one of {', '.join(_KINDS)}, not {kind!r}")
    return tuple(
        Definition(
            name=name,
            description=getattr(found, "description", ""),
            content_json=json.dumps(schema.encode(found), ensure_ascii=False),
        )
        for name, found in sorted(_KINDS[kind]().items())
    )
