"""What a server tells of itself: its models, its KV blocks, how often it preempted."""

import json
import re
from dataclasses import dataclass
from http import HTTPStatus

import aiohttp

from foretoken.app.collect.target import Target
from foretoken.domain.errors import (
    ServiceUnavailableError,
    UnauthenticatedError,
    UnknownModelError,
)
from foretoken.domain.requests.serving_run import UNKNOWN

_SHORT_TIMEOUT_S = 10.0
# Source: vLLM's metrics: counters of all engines, and the configuration as labels of a gauge.
_CACHE_LABELS = re.compile(r"^vllm:cache_config_info\{(.*)\}", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_PREEMPTIONS = "vllm:num_preemptions_total"
_QUERIES, _HITS = "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerState:
    """Counters since the server started, and its cache; -1 where it does not say."""

    num_preemptions: float = UNKNOWN
    num_cache_queries: float = UNKNOWN
    num_cache_hits: float = UNKNOWN
    num_kv_blocks: int = UNKNOWN
    kv_block_tokens: int = UNKNOWN


async def check_server(client: aiohttp.ClientSession, target: Target) -> None:
    """Check that the server is there and serves the model.

    A server that does not list its models is taken to serve it.

    Raises:
        ServiceUnavailableError: nothing answers at the address.
        UnauthenticatedError: it wants another key.
        UnknownModelError: it serves other models; names them.

    """
    try:
        status, text = await _get(client, f"{target.root}/v1/models")
    except (aiohttp.ClientError, TimeoutError) as err:
        problem = f"no server answers at {target.root}: {type(err).__name__} {err}".rstrip()
        raise ServiceUnavailableError(problem) from err
    if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        raise UnauthenticatedError(f"{target.root} refuses the API key; see --api-key-variable")
    served = _model_names(text) if status == HTTPStatus.OK else []
    if served and target.model not in served:
        raise UnknownModelError.named(target.model, served)


async def read_state(client: aiohttp.ClientSession, target: Target) -> ServerState:
    """Return what the server's metrics say; nothing where it has none."""
    try:
        status, text = await _get(client, f"{target.root}/metrics")
    except (aiohttp.ClientError, TimeoutError):
        return ServerState()
    return parse_metrics(text) if status == HTTPStatus.OK else ServerState()


async def _get(client: aiohttp.ClientSession, url: str) -> tuple[int, str]:
    timeout = aiohttp.ClientTimeout(total=_SHORT_TIMEOUT_S)
    async with client.get(url, timeout=timeout) as response:
        return response.status, await response.text(errors="replace")


def parse_metrics(text: str) -> ServerState:
    """Return what a page of Prometheus metrics says, summed over engines."""
    labels = _CACHE_LABELS.findall(text)
    configs = [dict(_LABEL.findall(found)) for found in labels]
    blocks = [int(item["num_gpu_blocks"]) for item in configs if _is_count(item, "num_gpu_blocks")]
    sizes = [int(item["block_size"]) for item in configs if _is_count(item, "block_size")]
    return ServerState(
        num_preemptions=_sum_counter(text, _PREEMPTIONS),
        num_cache_queries=_sum_counter(text, _QUERIES),
        num_cache_hits=_sum_counter(text, _HITS),
        # Each engine has a cache of its own, and a simulation counts one engine's.
        num_kv_blocks=min(blocks, default=UNKNOWN),
        kv_block_tokens=min(sizes, default=UNKNOWN),
    )


def _is_count(labels: dict[str, str], name: str) -> bool:
    return labels.get(name, "").isdigit()


def _sum_counter(text: str, name: str) -> float:
    pattern = rf"^{re.escape(name)}(?:\{{[^}}]*\}})? ([0-9.eE+-]+)"
    values = [float(value) for value in re.findall(pattern, text, re.MULTILINE)]
    return sum(values) if values else UNKNOWN


def _model_names(text: str) -> list[str]:
    try:
        return [str(item["id"]) for item in json.loads(text)["data"]]
    except (ValueError, KeyError, TypeError):
        return []
