"""Write the files that start a deployment and measure it."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from foretoken.domain.errors import InvalidRequestError, UnknownPluginError
from foretoken.domain.frameworks.engine import EngineProfile
from foretoken.domain.hardware.topology import find_topology, topology_of_device
from foretoken.domain.plugins import scan_modules
from foretoken.domain.requests.cluster import ReplicaPool
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.simulator.cluster.fleet import pool_scenarios
from foretoken.simulator.launch.generated_file import (
    dump_manifests,
    render_scenario,
    write_files,
)
from foretoken.simulator.launch.manifests import (
    PART,
    Manifest,
    measurement_manifests,
    router_manifests,
    server_manifests,
    server_urls,
)
from foretoken.simulator.launch.server import (
    POD_ADDRESS,
    SERVER_PORT,
    Launch,
    LaunchPool,
    ServingEngine,
)
from foretoken.simulator.serving.engine_limit import EngineBound, list_engine_lacks
from foretoken.simulator.workload.requests import resolve_workload

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
        else find_server_of(pools[0].scenario.engine.resolve())
    )
    _check_server_has(pools, engine)
    launches = [engine.serve(pool) for pool in pools]
    router = _route(scenario, pools, engine)
    files = _render(pools, launches, router)
    entry = "router" if router else pools[0].pool.name
    collect = _collect(engine, pools[0].model_id, entry)
    scenario_text = render_scenario(scenario)
    files["scenario.yaml"] = scenario_text
    files["measure.yaml"] = dump_manifests(
        measurement_manifests(scenario_text, collect, options.measure_image)
    )
    started = [*launches, *([router] if router else [])]
    files["README.md"] = _describe(scenario, started, entry, options.measure_image)
    return write_files(folder, files)


def _check_server_has(pools: Sequence[LaunchPool], engine: ServingEngine) -> None:
    """Refuse what the server, or the release that the engine's profile is of, cannot do."""
    for pool in pools:
        mode = "aggregated" if pool.pool.role == "aggregated" else "disaggregated"
        profile = pool.scenario.engine.resolve()
        bound = EngineBound(name=engine.name, can=engine.can)
        if profile.engine == engine.name:
            bound = EngineBound(name=profile.name, can=profile.can)
        if lacks := list_engine_lacks(pool.scenario, mode, bound):
            raise InvalidRequestError.of_violations(lacks)


def _find_pools(scenario: ServingScenario, options: LaunchOptions) -> list[LaunchPool]:
    declared: Sequence[ReplicaPool]
    if scenario.cluster is None:
        num_replicas = 1 if scenario.layout.ep > 1 else scenario.layout.dp
        declared = [ReplicaPool(name="server", num_replicas=num_replicas)]
        layout = replace(scenario.layout, dp=scenario.layout.dp // num_replicas)
        parts: Sequence[ServingScenario] = [replace(scenario, layout=layout)]
    else:
        declared, parts = scenario.cluster.pools, pool_scenarios(scenario)
    plan = resolve_workload(scenario.workload, scenario.slo_classes, scenario.seed)
    longest = int((plan.num_prefill_tokens + plan.num_decode_tokens).max())
    rounded = -(-longest // _TOKENS_ROUNDED_TO) * _TOKENS_ROUNDED_TO
    model_id = options.model_id or next(
        (alias for alias in scenario.model.aliases if "/" in alias), scenario.model.name
    )
    return [
        LaunchPool(
            pool=replace(pool, name=_dns_name(pool.name)),
            scenario=part,
            model_id=model_id,
            max_tokens=min(rounded, scenario.model.max_position),
        )
        for pool, part in zip(declared, parts, strict=True)
    ]


def find_server(name: str) -> ServingEngine:
    """Return how the server of this name is started.

    Raises:
        UnknownPluginError: no files are written for it.

    """
    server: ServingEngine = UnknownPluginError.look_up(name, all_servers())
    return server


def all_servers() -> Mapping[str, ServingEngine]:
    """Return every server that files are written for, by its name."""
    return scan_modules("foretoken.simulator.launch.engines", "ENGINE")


def find_server_of(profile: EngineProfile) -> ServingEngine:
    """Return the server of a profile's engine.

    Raises:
        InvalidRequestError: no files are written for it.

    """
    if profile.engine not in all_servers():
        raise InvalidRequestError.of_field(
            "engine",
            f"files are written for {' and '.join(sorted(all_servers()))}, not for"
            f" {profile.engine}: choose one",
        )
    return find_server(profile.engine)


def _route(
    scenario: ServingScenario, pools: Sequence[LaunchPool], engine: ServingEngine
) -> Launch | None:
    """Return the router's start; none before a single replica."""
    num_replicas = sum(pool.pool.num_replicas for pool in pools)
    if num_replicas == 1:
        return None
    urls: dict[str, list[str]] = {}
    for pool in pools:
        urls.setdefault(pool.pool.role, []).extend(
            server_urls(pool.pool.name, pool.pool.num_replicas)
        )
    router = scenario.cluster.routing.router if scenario.cluster else "round_robin"
    return engine.route(urls, router)


def _render(
    pools: Sequence[LaunchPool],
    launches: Sequence[Launch],
    router: Launch | None,
) -> dict[str, str]:
    commands = [
        "# Each command starts one replica, on a machine of its own; a router's names of replicas",
        "# are those they have in Kubernetes, put your machines' in their place.",
        "",
    ]
    manifests: list[Manifest] = []
    differ = len({pool.scenario.device for pool in pools}) > 1
    for pool, launch in zip(pools, launches, strict=True):
        _check_node(pool)
        count = pool.pool.num_replicas
        commands.append(f"# {pool.pool.name}: {count} x {pool.num_devices} {pool.scenario.device}")
        commands += [_shell(launch), ""]
        manifests += server_manifests(pool, launch, names_device=differ)
    if router:
        commands += ["# router", _shell(router), ""]
        manifests += router_manifests(router)
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": ["deployment.yaml"],
    }
    return {
        "commands.sh": "\n".join(commands),
        "deployment.yaml": dump_manifests(manifests),
        "kustomization.yaml": yaml.safe_dump(kustomization, sort_keys=False),
    }


def _check_node(pool: LaunchPool) -> None:
    scenario = pool.scenario
    topology = (
        find_topology(scenario.topology)
        if scenario.topology
        else topology_of_device(scenario.device)
    )
    if pool.num_devices > topology.devices_per_node:
        raise InvalidRequestError.of_field(
            "layout",
            f"a replica of {pool.pool.name} has {pool.num_devices} devices, a node of"
            f" {topology.name} {topology.devices_per_node}: files are written for replicas that"
            " fit a node",
        )


def _collect(engine: ServingEngine, model_id: str, entry: str) -> list[str]:
    return [
        "foretoken",
        "collect",
        "/scenario/scenario.yaml",
        "--url",
        f"http://{entry}:{SERVER_PORT}",
        "--model",
        model_id,
        "--server",
        engine.name,
        "--out",
        "/results/run.json",
    ]


def _describe(
    scenario: ServingScenario, launches: Sequence[Launch], entry: str, measure_image: str
) -> str:
    remarks = dict.fromkeys(remark for launch in launches for remark in launch.remarks)
    lines = [
        f"# {scenario.name}",
        "",
        f"{scenario.model.name} on {scenario.num_devices} devices, as `scenario.yaml` says.",
        "",
        "- `commands.sh`: what starts each replica by hand",
        "- `deployment.yaml`, `kustomization.yaml`: the same for Kubernetes",
        "- `measure.yaml`: a job that replays the scenario's workload against it",
        "- `scenario.yaml`: what was simulated",
        "",
        "```bash",
        "kubectl create secret generic hugging-face --from-literal=token=...  # where needed",
        "kubectl apply -k .",
        f"kubectl get statefulset,deployment --selector {PART} --output name \\",
        "    | xargs -n 1 kubectl rollout status --timeout=60m",
        f"kubectl get service {entry}",
        "kubectl apply -f measure.yaml",
        "kubectl wait --for=jsonpath='{.status.ready}'=1 job/measure --timeout=60m",
        "kubectl exec job/measure -c run -- cat /results/run.json > run.json",
        "kubectl delete -f measure.yaml",
        "foretoken validate serving scenario.yaml --measured run.json --html comparison.html",
        "```",
    ]
    remarks[f"set the image {measure_image} of `measure.yaml` to where your cluster finds it"] = (
        None
    )
    lines += ["", "Before you start it:", "", *(f"- {remark}" for remark in remarks)]
    return "\n".join([*lines, ""])


def _shell(launch: Launch) -> str:
    variables = "".join(
        f"{name}={shlex.quote(value.replace(f'{{{POD_ADDRESS}}}', 'ADDRESS'))} \\\n  "
        for name, value in launch.variables.items()
    )
    return variables + " ".join(shlex.quote(word) for word in launch.command)


def _dns_name(name: str) -> str:
    """Return a name that Kubernetes takes."""
    kept = "".join(letter if letter.isalnum() else "-" for letter in name.lower())
    return kept.strip("-")[:40] or "server"
