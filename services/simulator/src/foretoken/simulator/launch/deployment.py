"""Write the files that start a deployment and measure it."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.hardware.topology import topology_of_device
from foretoken.domain.requests.cluster import ReplicaPool
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.simulator.cluster.fleet import encoder_scenario, pool_scenarios
from foretoken.simulator.launch.files import (
    render,
    render_manifests,
    render_scenario,
    write_files,
)
from foretoken.simulator.launch.server import (
    FILES_FOLDER,
    POD_ADDRESS,
    SERVER_PORT,
    STARTUP_S,
    STORE_NAME,
    STORE_PORT,
    Launch,
    LaunchPool,
    ServingEngine,
    all_servers,
    find_server,
    find_server_of,
    hub_name,
)
from foretoken.simulator.serving.engine_limit import EngineBound, list_engine_lacks
from foretoken.simulator.workload.requests import resolve_workload

# Where containers have the files of their commands.
_MOUNTED_AT = "/launch"
# The longest request is rounded up to so many tokens, as chat templates add some.
_TOKENS_ROUNDED_TO = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchOptions:
    """What a scenario does not say: the server (empty: the profile's), and what it loads.

    `model_id` is a name on Hugging Face or a path (empty: the model's own name there).
    `measure_image` is the image of Foretoken that measures.
    """

    engine: str = ""
    model_id: str = ""
    measure_image: str = "foretoken-simulator"


def write_deployment(
    scenario: ServingScenario, folder: Path, options: LaunchOptions | None = None
) -> tuple[Path, ...]:
    """Write commands, Kubernetes manifests, a measuring job and a README; return their paths.

    Raises:
        InvalidRequestError: no server can be started as the scenario says, or the folder cannot be
            written.

    """
    options = options or LaunchOptions()
    pools = _find_pools(scenario, options)
    engine = (
        find_server(options.engine)
        if options.engine
        else find_server_of(pools[0].scenario.resolve_engine())
    )
    _check_server_has(pools, engine)
    launches = [engine.serve(pool) for pool in pools]
    router = _route(scenario, pools, engine)
    store = next((engine.share(pool) for pool in pools if pool.num_sharing), None)
    started = {**_started(pools, launches, router), "store": store and _commands(store)}
    scenario_text = render_scenario(scenario)
    about = {
        "entry": "router" if router else pools[-1].pool.name,
        "image": options.measure_image,
        "port": SERVER_PORT,
    }
    measured = {
        "scenario_text": scenario_text,
        "model_id": pools[0].model_id,
        "server": engine.name,
    }
    launched = [*launches, *([router] if router else [])]
    remarks = dict.fromkeys(remark for launch in launched for remark in launch.remarks)
    read = {name: text for launch in launched for name, text in launch.files.items()}
    return write_files(
        folder,
        {
            **read,
            "commands.sh": render("commands.sh", started),
            "deployment.yaml": render_manifests("deployment.yaml", started),
            "kustomization.yaml": render("kustomization.yaml", {"resource": "deployment.yaml"}),
            "scenario.yaml": scenario_text,
            "measure.yaml": render_manifests("measure.yaml", measured | about),
            "README.md": render(
                "deployment.md",
                {"scenario": scenario, "remarks": remarks, "files": list(read), **about},
            ),
        },
    )


def _check_server_has(pools: Sequence[LaunchPool], engine: ServingEngine) -> None:
    """Refuse what the server, or the release that the engine's profile is of, cannot do."""
    roles = {pool.pool.role for pool in pools}
    encoders = "apart" if "encoder" in roles else "together"
    if encoders == "apart" and not engine.encodes_apart:
        others = [server.label for server in all_servers().values() if server.encodes_apart]
        why = f"files for encoders apart are written for {' and '.join(others)} alone"
        raise InvalidRequestError.of_field("cluster.pools", why)
    for pool in pools:
        profile = pool.scenario.resolve_engine()
        if profile.ffn_devices:
            why = "no files are written for attention and experts apart: set it 0"
            raise InvalidRequestError.of_field("engine.rules.ffn_devices", why)
        bound = EngineBound(name=engine.name, can=engine.can)
        if profile.engine == engine.name:
            bound = EngineBound(name=profile.name, can=profile.can)
        if lacks := list_engine_lacks(pool.scenario, pool.pool.role, bound, encoders):
            raise InvalidRequestError.of_violations(lacks)


def _find_pools(scenario: ServingScenario, options: LaunchOptions) -> list[LaunchPool]:
    declared: Sequence[ReplicaPool]
    if scenario.cluster is None:
        num_replicas = 1 if scenario.layout.shares_experts else scenario.layout.dp
        declared = [ReplicaPool(name="server", num_replicas=num_replicas)]
        layout = replace(scenario.layout, dp=scenario.layout.dp // num_replicas)
        parts: Sequence[ServingScenario] = [replace(scenario, layout=layout)]
    else:
        declared, parts = scenario.cluster.engine_pools, pool_scenarios(scenario)
        encoders, encoder = scenario.cluster.encoders, encoder_scenario(scenario)
        if encoders is not None and encoder is not None:
            declared, parts = (encoders, *declared), (encoder, *parts)
    plan = resolve_workload(scenario.workload, scenario.slo_classes, scenario.seed)
    longest = int((plan.num_prefill_tokens + plan.num_decode_tokens).max())
    rounded = -(-longest // _TOKENS_ROUNDED_TO) * _TOKENS_ROUNDED_TO
    named = [replace(pool, name=_dns_name(pool.name)) for pool in declared]
    urls = tuple(url for pool in named if pool.role == "encoder" for url in _urls_of(pool))
    num_sharing = sum(
        pool.num_replicas * part.layout.num_devices
        for pool, part in zip(named, parts, strict=True)
        if _is_sharing(part)
    )
    return [
        LaunchPool(
            pool=pool,
            scenario=part,
            model_id=options.model_id or hub_name(scenario.model),
            max_tokens=min(rounded, scenario.model.max_position),
            # What decodes is sent no images.
            encoder_urls=urls if pool.role in ("aggregated", "prefill") else (),
            num_sharing=num_sharing if _is_sharing(part) else 0,
        )
        for pool, part in zip(named, parts, strict=True)
    ]


def _is_sharing(part: ServingScenario) -> bool:
    """Whether the replicas of a pool share a store of KV blocks."""
    return any(tier.is_shared for tier in part.engine.kv_tiers)


def _urls_of(pool: ReplicaPool) -> list[str]:
    """Return the addresses of replicas: those of a stateful set have names of their own."""
    return [
        f"http://{pool.name}-{index}.{pool.name}:{SERVER_PORT}"
        for index in range(pool.num_replicas)
    ]


def _route(
    scenario: ServingScenario, pools: Sequence[LaunchPool], engine: ServingEngine
) -> Launch | None:
    """Return the router's start; none before a single replica."""
    urls: dict[str, list[str]] = {}
    for pool in (pool.pool for pool in pools if pool.pool.role != "encoder"):
        urls.setdefault(pool.role, []).extend(_urls_of(pool))
    if sum(map(len, urls.values())) == 1:
        return None
    router = scenario.cluster.routing.router if scenario.cluster else "round_robin"
    return engine.route(urls, router, engine.image(pools[-1]))


def _started(
    pools: Sequence[LaunchPool], launches: Sequence[Launch], router: Launch | None
) -> dict[str, object]:
    """Return what the templates of a deployment take."""
    return {
        "names_device": len({pool.scenario.device for pool in pools}) > 1,
        "servers": [
            {
                "name": pool.pool.name,
                "num_replicas": pool.pool.num_replicas,
                "device": pool.scenario.device,
                "num_devices": _check_node(pool).num_devices,
                **_commands(launch),
            }
            for pool, launch in zip(pools, launches, strict=True)
        ],
        "router": router and _commands(router),
        "address": POD_ADDRESS,
        "port": SERVER_PORT,
        "store_name": STORE_NAME,
        "store_port": STORE_PORT,
        "mounted_at": _MOUNTED_AT,
        "startup_s": STARTUP_S,
    }


def _commands(launch: Launch) -> dict[str, object]:
    """Return a start for a shell next to its files, and for a container that has them mounted.

    A pod's address is a variable there.
    """
    address = f"{{{POD_ADDRESS}}}"
    variables = "".join(
        f"{name}={shlex.quote(value.replace(address, 'ADDRESS'))} \\\n  "
        for name, value in launch.variables.items()
    )
    return {
        "launch": launch,
        "shell": variables + shlex.join(_placed(launch, ".")),
        "command": _placed(launch, _MOUNTED_AT),
        "needs_address": any(address in value for value in launch.variables.values()),
        "variables": {
            name: value.replace(address, f"$({POD_ADDRESS})")
            for name, value in launch.variables.items()
        },
    }


def _placed(launch: Launch, folder: str) -> list[str]:
    """Return the words of a command whose files lie in a folder."""
    return [word.replace(FILES_FOLDER, folder) for word in launch.command]


def _check_node(pool: LaunchPool) -> LaunchPool:
    scenario = pool.scenario
    topology = topology_of_device(scenario.device, scenario.topology)
    if pool.num_devices > topology.devices_per_node:
        raise InvalidRequestError.of_field(
            "layout",
            f"a replica of {pool.pool.name} has {pool.num_devices} devices, a node of"
            f" {topology.name} {topology.devices_per_node}: files are written for replicas that"
            " fit a node",
        )
    return pool


def _dns_name(name: str) -> str:
    """Return a name that Kubernetes takes."""
    kept = "".join(letter if letter.isalnum() else "-" for letter in name.lower())
    return kept.strip("-")[:40] or "server"
