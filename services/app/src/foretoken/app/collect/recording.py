"""Collect a run: check the server, warm it up, replay, record."""

import asyncio
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from http import HTTPStatus

import aiohttp
import numpy as np

from foretoken.app.collect.replay import Progress, PromptMaker, Replay
from foretoken.app.collect.sender import open_client
from foretoken.app.collect.target import Target
from foretoken.domain.errors import (
    ServiceUnavailableError,
    UnauthenticatedError,
    UnknownModelError,
)
from foretoken.domain.requests.serving_run import UNKNOWN, UNKNOWN_S, MeasuredRequest, ServingRun
from foretoken.simulator.workload.request_plan import RequestPlan, find_first, plan_requests

_SHORT_TIMEOUT_S = 10.0
# Source: vLLM's metrics: counters of all engines, and the configuration as labels of a gauge.
_CACHE_LABELS = re.compile(r"^vllm:cache_config_info\{(.*)\}", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_PREEMPTIONS = "vllm:num_preemptions_total"
_QUERIES, _HITS = "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"
# Warm-up prompts must not be in the cache of the workload's own.
_WARM_UP_SEED = 0x5EED
_WARM_UP_MAX_TOKENS = 16
# Content is named by so many tokens: the block in which vLLM finds it again.
_NAMED_TOKENS = 16


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Collection:
    """What to collect: a plan, and how to replay it. `seed` decides what the prompts say."""

    target: Target
    plan: RequestPlan
    name: str = ""
    seed: int = 0
    num_warm_up: int = 1
    max_in_flight: int = 0
    settings: Mapping[str, str] = field(default_factory=dict)


def collect_run(collection: Collection, on_progress: Progress | None = None) -> ServingRun:
    """Replay a plan and return what was recorded, also of a run that is interrupted by Ctrl-C.

    Raises:
        ServiceUnavailableError: nothing answers at the address, or the first request fails.
        UnauthenticatedError, UnknownModelError: the server refuses the key, or serves other models.
        InvalidRequestError: the file of certificates cannot be read.

    """
    return asyncio.run(_collect(collection, on_progress))


async def _collect(collection: Collection, on_progress: Progress | None) -> ServingRun:
    async with open_client(collection.target) as client:
        await check_server(client, collection.target)
        if collection.num_warm_up:
            await _warm_up(collection, client)
        before = await read_state(client, collection.target)
        started_at = datetime.now(UTC)
        replay = Replay(
            target=collection.target,
            plan=collection.plan,
            prompts=PromptMaker(collection.plan, collection.seed),
            client=client,
            max_in_flight=collection.max_in_flight,
            on_progress=on_progress,
        )
        is_interrupted = await replay.run()
        after = ServerState() if is_interrupted else await _read_last(client, collection.target)
    requests = _requests(replay)
    run = ServingRun(
        name=collection.name,
        source="foretoken collect",
        model=collection.target.model,
        started_at=started_at.isoformat(timespec="seconds"),
        requests=requests,
        hash_block_tokens=_NAMED_TOKENS if any(r.block_hashes for r in requests) else 0,
        # Where users think between turns, fewer are under way than the loop holds.
        concurrency=collection.plan.concurrency if _has_no_waits(collection.plan) else 0,
        is_interrupted=is_interrupted,
        settings=collection.settings,
    )
    run = replace(run, cached_token_ratio=_cached_ratio(replay))
    return _with_state(run, before, after)


def _has_no_waits(plan: RequestPlan) -> bool:
    return bool(find_first(plan.follows, plan.joins).all())


async def _read_last(client: aiohttp.ClientSession, target: Target) -> ServerState:
    try:
        return await read_state(client, target)
    except asyncio.CancelledError:
        # Ctrl-C with everything recorded: only what the server tells is lost.
        return ServerState()


async def _warm_up(collection: Collection, client: aiohttp.ClientSession) -> None:
    """Send some requests one by one; a server that fails them will fail the rest."""
    ones = np.ones(collection.num_warm_up, dtype=np.int64)
    plan = plan_requests(
        ones * 0,
        ones * int(np.median(collection.plan.num_prefill_tokens)),
        ones * min(int(np.median(collection.plan.num_decode_tokens)), _WARM_UP_MAX_TOKENS),
        concurrency=1,
    )
    prompts = PromptMaker(plan, collection.seed ^ _WARM_UP_SEED)
    replay = Replay(target=collection.target, plan=plan, prompts=prompts, client=client)
    if await replay.run():
        raise asyncio.CancelledError
    failed = [answer.to_request().error for answer in replay.answers.values()]
    if all(failed):
        problem = f"{collection.target.root}{collection.target.path} failed the first request"
        raise ServiceUnavailableError(f"{problem}: {failed[0]}")


def _requests(replay: Replay) -> tuple[MeasuredRequest, ...]:
    """Return the recorded requests in the order they were sent, with their content's names."""
    names = replay.prompts.name_blocks(_NAMED_TOKENS)
    found = []
    for index, answer in replay.answers.items():
        request = answer.to_request()
        # A server that counts fewer tokens than words has fewer blocks of them.
        num_blocks = request.num_prefill_tokens // _NAMED_TOKENS
        found.append(replace(request, block_hashes=names[index][:num_blocks]))
    return tuple(sorted(found, key=lambda request: request.arrival_s))


def _cached_ratio(replay: Replay) -> float:
    """Return the share of prompt tokens the answers say were cached; -1 where they do not say."""
    known = [answer for answer in replay.answers.values() if answer.cached_tokens >= 0]
    num_tokens = sum(answer.prompt_tokens for answer in known)
    return (
        sum(answer.cached_tokens for answer in known) / num_tokens if num_tokens > 0 else UNKNOWN_S
    )


def _with_state(run: ServingRun, before: ServerState, after: ServerState) -> ServingRun:
    """Return the run with what the server's counters say of it."""
    queries = after.num_cache_queries - before.num_cache_queries
    has_counters = before.num_preemptions >= 0 and after.num_preemptions >= 0
    hits = after.num_cache_hits - before.num_cache_hits
    return replace(
        run,
        num_kv_blocks=after.num_kv_blocks,
        kv_block_tokens=after.kv_block_tokens,
        num_preemptions=(
            round(after.num_preemptions - before.num_preemptions) if has_counters else UNKNOWN
        ),
        cached_token_ratio=hits / queries if queries > 0 else run.cached_token_ratio,
    )
