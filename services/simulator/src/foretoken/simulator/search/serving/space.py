"""The points of a search: which engines there are, and what each may be set to."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from foretoken.domain.errors import FieldViolation, InvalidRequestError, UnknownTopologyError
from foretoken.domain.frameworks.engine import EngineProfile, EngineSpec
from foretoken.domain.hardware.device import find_device
from foretoken.domain.hardware.topology import find_topology, topology_of_device
from foretoken.domain.models.image import without_encoder
from foretoken.domain.models.quantization import executed_quantization, settle_quantization
from foretoken.domain.models.stack import stack_of
from foretoken.domain.requests.cluster import settle_speculation
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.scenario import ServingScenario, replica_layout
from foretoken.domain.requests.search import SERVING_MODES, ServingSearchRequest
from foretoken.simulator.launch.server import find_server
from foretoken.simulator.serving.draft import list_speculation_lacks
from foretoken.simulator.serving.engine_limit import EngineBound, list_engine_lacks, list_idle_tiers
from foretoken.simulator.serving.scenario_check import check_scenario

# Requests on a replica where none are named: about four per doubling, sizes engines capture.
_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224)
_LARGE_BATCHES = (256, 320, 384, 448, 512, 640, 768, 896, 1024)
# Tokens of a step where none are named, besides the profile's own.
_STEP_LIMITS = (2048, 4096, 8192, 16384)
# Before replicas that are as full as their limit allows, turns would leave some waiting.
_ROUTER = "least_outstanding"
# Replicas that encode images apart.
_ENCODERS = (0, 1, 2, 4)
# Prompts that a prefill replica computes together.
_PREFILL_BATCHES = (1, 2, 4, 8)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineKind:
    """An engine apart from its limits: where it runs, what runs, and its degrees.

    `speculation` is as `settle_speculation` reads it, `rules` as `EngineSpec.with_rules`
    does, `kv_tiers` as its `with_tiers`, `server` what files are to be written for (empty: none
    are). With `encodes_apart` it is sent the embeddings of images.
    """

    device: str
    profile: str
    quantization: str
    layout: ParallelLayout
    speculation: str = ""
    rules: str = ""
    kv_tiers: str = ""
    server: str = ""
    encodes_apart: bool = False

    def scenario(
        self, base: ServingScenario, batch: int, num_batched_tokens: int
    ) -> ServingScenario:
        """Return a replica of this kind with limits; requests are spread over its engines."""
        per_engine = -(-batch // self.layout.dp)
        engine = replace(
            self._engine(base),
            max_num_seqs=per_engine,
            max_num_batched_tokens=num_batched_tokens,
        )
        model, workload = base.model, base.workload
        if self.encodes_apart:
            model, workload = without_encoder(model), replace(workload, images=None)
        return replace(
            base,
            model=model,
            workload=workload,
            device=self.device,
            topology=base.topology if self.device == base.device else "",
            quantization=self.quantization,
            layout=self.layout,
            engine=engine,
            speculative=settle_speculation(self.speculation, base.speculative),
            cluster=None,
        )

    def resolve_engine(self, base: ServingScenario) -> EngineProfile:
        """Return the engine's rules on the kind's device."""
        return self._engine(base).resolve(find_device(self.device), self.layout.tp)

    def _engine(self, base: ServingScenario) -> EngineSpec:
        engine = base.engine.with_rules(self.rules).with_tiers(self.kv_tiers)
        return replace(engine, profile=self.profile)

    def find_lacks(self, base: ServingScenario, role: str) -> str:
        """Return what the engine, or the server, has not of a pool of that role; empty if all."""
        profile = self.resolve_engine(base)
        bounds = [EngineBound(name=profile.name, can=profile.can)]
        if self.server:
            server = find_server(self.server)
            bounds.append(EngineBound(name=server.name, can=server.can))
        replica = self.scenario(base, 1, 0)
        encoders = "apart" if self.encodes_apart else "together"
        lacks = [
            lack for bound in bounds for lack in list_engine_lacks(replica, role, bound, encoders)
        ]
        if self.server and self.encodes_apart and not find_server(self.server).encodes_apart:
            why = f"no files are written for {self.server} with encoders apart"
            lacks.append(FieldViolation("space.encoders", why))
        lacks += list_speculation_lacks(replica) + list_idle_tiers(replica)
        return InvalidRequestError.of_violations(lacks).message


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchSpace:
    """What a search varies, resolved: no empty tuple stands for anything any more.

    `num_same_kinds` counts degrees that mean a kind over again, `encoders` are the numbers of
    replicas that encode images apart (0: engines do).
    """

    kinds: tuple[EngineKind, ...]
    modes: tuple[str, ...]
    batches: tuple[int, ...]
    prefill_batches: tuple[int, ...]
    step_limits: tuple[int, ...]
    routers: tuple[str, ...]
    max_devices: int
    num_same_kinds: int
    encoders: tuple[int, ...] = (0,)

    @property
    def num_points(self) -> int:
        """Points before equal ones are merged."""
        num_limits = len(self.step_limits) * len(self.routers)
        apart = [count > 0 for count in self.encoders]
        num_kinds = (len(self.kinds) + self.num_same_kinds) // len(set(apart))
        total = 0
        if "aggregated" in self.modes:
            total += num_kinds * len(self.batches) * num_limits
        if "disaggregated" in self.modes:
            prefills = num_kinds * len(self.prefill_batches)
            total += prefills * num_kinds * len(self.batches) * num_limits
        return total * len(apart)


def check_bases(request: ServingSearchRequest) -> None:
    """Check the scenario on the devices, and by the profiles, of the space.

    Engines that do not run on some of the devices are left out of the search, as long as there is
    one that does.

    Raises:
        as `check_scenario`, of the first of them: none can be.

    """
    base, refused = request.scenario, None
    profiles = request.space.profiles or (base.engine.profile,)
    for device, profile in product(request.space.devices or (base.device,), profiles):
        topology = base.topology if device == base.device else ""
        engine = replace(base.engine, profile=profile)
        try:
            check_scenario(replace(base, device=device, topology=topology, engine=engine))
        except InvalidRequestError as err:
            refused = refused or err
        else:
            return
    if refused is not None:
        raise refused


def resolve_space(request: ServingSearchRequest) -> SearchSpace:
    """Return what a request varies, defaults filled in.

    Raises:
        UnknownDeviceError, UnknownPluginError: no such name.
        InvalidRequestError: the engine's limits cannot be used.

    """
    space, scenario = request.space, request.scenario
    profiles = space.profiles or (scenario.engine.profile,)
    devices = tuple(dict.fromkeys(space.devices or (scenario.device,)))
    resolved = [
        replace(scenario.engine.with_rules(text), profile=profile).resolve(find_device(device))
        for profile, device, text in product(profiles, devices, space.rules or ("",))
    ]
    schemes = _schemes(request, devices, resolved)
    speculations = tuple(dict.fromkeys(space.speculations or ("",)))
    encoders = _encoders(request)
    kinds = [
        EngineKind(
            device=device,
            profile=profile,
            quantization=quantization,
            layout=layout,
            speculation=speculation,
            rules=rules,
            kv_tiers=kv_tiers,
            server=space.server,
            encodes_apart=encodes_apart,
        )
        for encodes_apart in dict.fromkeys(count > 0 for count in encoders)
        for device in devices
        for profile in dict.fromkeys(profiles)
        for quantization in schemes
        for speculation in speculations
        for rules in dict.fromkeys(space.rules or ("",))
        for kv_tiers in dict.fromkeys(space.kv_tiers or ("",))
        for layout in _layouts(request, device)
    ]
    distinct = tuple(dict.fromkeys(kinds))
    return SearchSpace(
        kinds=distinct,
        modes=tuple(mode for mode in SERVING_MODES if mode in (space.modes or SERVING_MODES)),
        batches=_batches(request),
        prefill_batches=_PREFILL_BATCHES,
        step_limits=_step_limits(request, resolved),
        routers=tuple(dict.fromkeys(space.routers)) or (_router_of(scenario),),
        max_devices=space.max_devices,
        num_same_kinds=len(kinds) - len(distinct),
        encoders=encoders,
    )


def _schemes(
    request: ServingSearchRequest, devices: Sequence[str], resolved: Sequence[EngineProfile]
) -> tuple[str, ...]:
    """Return the formats of the weights, all of which every engine runs on every device."""
    scenario = request.scenario
    schemes = [
        settle_quantization(name, scenario.model.quantization, scenario.dtype)
        for name in request.space.quantizations or (scenario.quantization,)
    ]
    for device, engine, quantization in product(
        devices,
        dict.fromkeys(profile.engine for profile in resolved),
        schemes,
    ):
        executed_quantization(quantization, find_device(device), engine)
    return tuple(dict.fromkeys(schemes))


def _encoders(request: ServingSearchRequest) -> tuple[int, ...]:
    """Return how many replicas may encode images apart: those named that leave devices, or some."""
    if request.scenario.workload.images is None:
        if any(request.space.encoders):
            raise InvalidRequestError.of_field(
                "space.encoders", "the workload has no images to encode: set workload.images"
            )
        return (0,)
    tried = request.space.encoders or _ENCODERS
    left = tuple(sorted({count for count in tried if count < request.space.max_devices}))
    if not left:
        raise InvalidRequestError.of_field(
            "space.encoders", f"leave no device of {request.space.max_devices} for engines"
        )
    return left


def _layouts(request: ServingSearchRequest, device: str) -> list[ParallelLayout]:
    space = request.space
    most = min(_node_devices(request.scenario, device), space.max_devices)
    powers = tuple(1 << power for power in range(most.bit_length()) if 1 << power <= most)
    heads = stack_of(request.scenario.model).split_heads
    degrees = space.tp or tuple(tp for tp in powers if not any(count % tp for count in heads))
    is_shared = request.scenario.layout.attention_dp
    found = []
    for tp, dp in product(degrees, space.dp or (1,)):
        stages = space.pp or _stages(tp, most, space.max_devices)
        for pp, ep in product(stages, space.ep or (1,)):
            layout = ParallelLayout(tp=tp, pp=pp, dp=dp, ep=ep, attention_dp=is_shared and dp > 1)
            # Without shared experts data-parallel engines are replicas, which are counted anyway.
            layout = replica_layout(layout)
            if layout.num_devices <= space.max_devices:
                found.append(layout)
    return found


def _stages(tp: int, most: int, max_devices: int) -> tuple[int, ...]:
    """Return the pipelines tried where none are named: what is larger than a node goes over some.

    Inside a node tensor parallelism answers sooner at no more cost in memory.
    """
    if tp < most:
        return (1,)
    return tuple(1 << power for power in range((max_devices // most).bit_length()))


def _node_devices(scenario: ServingScenario, device: str) -> int:
    """Return the devices of a node; one where no topology says."""
    name = find_device(device).name
    if scenario.topology and device == scenario.device:
        return find_topology(scenario.topology).devices_per_node
    try:
        return topology_of_device(name).devices_per_node
    except UnknownTopologyError:
        return 1


def _batches(request: ServingSearchRequest) -> tuple[int, ...]:
    if request.space.max_num_seqs:
        return tuple(sorted(set(request.space.max_num_seqs)))
    most = request.scenario.engine.max_num_seqs
    tried = (*_BATCHES, *_LARGE_BATCHES)
    return tuple(sorted({*(batch for batch in tried if batch < most), most})) if most else tried


def _step_limits(
    request: ServingSearchRequest, profiles: Sequence[EngineProfile]
) -> tuple[int, ...]:
    if request.space.max_num_batched_tokens:
        return tuple(sorted(set(request.space.max_num_batched_tokens)))
    if request.scenario.engine.max_num_batched_tokens:
        return (request.scenario.engine.max_num_batched_tokens,)
    own = {profile.max_num_batched_tokens for profile in profiles}
    return tuple(sorted({*_STEP_LIMITS, *own}))


def _router_of(scenario: ServingScenario) -> str:
    return scenario.cluster.routing.router if scenario.cluster else _ROUTER
