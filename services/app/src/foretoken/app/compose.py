"""Hand every service its ports: local objects or gRPC clients, by configuration alone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

from foretoken.app.config import EMBEDDED, AppConfig
from foretoken.domain import schema
from foretoken.domain.errors import InvalidRequestError

if TYPE_CHECKING:
    from foretoken.catalog.config import CatalogConfig
    from foretoken.catalog.service import CatalogService
    from foretoken.catalog.upkeep.recovery import Recovery
    from foretoken.client.channel import Connection
    from foretoken.client.facade import Foretoken
    from foretoken.domain.measurements.profiling import ProfileOutline, ProfileRequest
    from foretoken.domain.ports import CatalogAdminPort, PredictorPort, ProfilerPort, SimulatorPort
    from foretoken.domain.requests.scenario import TrainingScenario
    from foretoken.domain.requests.training_run import TrainingMemoryReport
    from foretoken.jobs.sharing import SharedJobs

_log = logging.getLogger(__name__)

_LOCAL, _KUBERNETES = "local", "kubernetes"
# Where operators are timed: on this machine, or on the nodes of a cluster.
PROFILER_PLACES = (_LOCAL, _KUBERNETES)


class _Service(Protocol):
    def open(self) -> None: ...

    def close(self) -> None: ...


S = TypeVar("S", bound=_Service)
C = TypeVar("C")


class Composition:
    """The four ports, each made when first asked for; closes what it opened, last first.

    Services and clients are imported where one is made: a process waits only for those it uses.
    """

    def __init__(
        self,
        config: AppConfig,
        *,
        joins_owner: bool = True,
        on_join: Callable[[int], None] = lambda _: None,
        tell: Callable[[str], None] = _log.info,
    ) -> None:
        """Keep the configuration.

        With `joins_owner` the catalog is that of the process which has the home's open, if one has;
        `on_join` is then given its id. `tell` is given what people should know, once.
        """
        self._config = config
        self._tell = tell
        self._joins_owner = joins_owner
        self._on_join = on_join
        self._opened = ExitStack()

    def __enter__(self) -> Self:
        """Use as a context manager to close what was opened."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close all that was opened."""
        self.close()

    def close(self) -> None:
        """Close every service and channel, in reverse order of opening."""
        self._opened.close()

    @cached_property
    def catalog(self) -> CatalogAdminPort:
        """The catalog."""
        if self._config.endpoints.catalog != EMBEDDED:
            from foretoken.client.services import CatalogClient

            return CatalogClient(self._connect("catalog", self._config.endpoints.catalog))
        settings = catalog_config(self._config)
        if settings.lake is not None:
            return self._open(_new_catalog(settings))
        from foretoken.app.shared_home import SharedCatalog

        def open_own() -> CatalogService:
            service = _new_catalog(settings)
            service.open()
            return service

        folder = Path(f"{settings.path}.sockets")
        shared = SharedCatalog(folder, open_own, self._connect_inside, self._on_join)
        shared.open(joins=self._joins_owner)
        self._opened.callback(shared.close)
        return shared.port

    @cached_property
    def predictor(self) -> PredictorPort:
        """The predictor; an embedded one reads this composition's catalog."""
        if self._config.endpoints.predictor != EMBEDDED:
            from foretoken.client.services import PredictorClient

            return PredictorClient(self._connect("predictor", self._config.endpoints.predictor))
        from foretoken.predictor.config import PredictorConfig
        from foretoken.predictor.service import PredictorService

        config = _section(
            PredictorConfig, self._config.predictor, self._state("predictor"), "predictor"
        )
        sharing = self._share("predictor", config.job_lease_s) if config.shares_jobs else None
        predictor = self._open(PredictorService(config, self.catalog, sharing=sharing))
        if config.starter:
            from foretoken.app.starter import tell_once

            if said := tell_once(self._config.home_path, Path(config.starter)):
                self._tell(said)
        return predictor

    @cached_property
    def simulator(self) -> SimulatorPort:
        """The simulator; an embedded one queries this composition's predictor."""
        if self._config.endpoints.simulator != EMBEDDED:
            from foretoken.client.services import SimulatorClient

            return SimulatorClient(self._connect("simulator", self._config.endpoints.simulator))
        from foretoken.simulator.config import SimulatorConfig
        from foretoken.simulator.service import SimulatorService

        config = _section(
            SimulatorConfig, self._config.simulator, self._state("simulator"), "simulator"
        )
        endpoints = self._config.endpoints
        # A catalog of this process's own is opened for results where it is open for the predictor.
        has_catalog = endpoints.predictor == EMBEDDED or endpoints.catalog != EMBEDDED
        catalog = self.catalog if has_catalog else None
        sharing = self._share("simulator", config.job_lease_s) if config.shares_jobs else None
        return self._open(SimulatorService(config, self.predictor, catalog, sharing))

    @property
    def plan_training_memory(self) -> Callable[[TrainingScenario], TrainingMemoryReport]:
        """What plans memory, as the simulator's method of that name does.

        In this process it is the arithmetic alone, for a simulator loads packages and opens a
        predictor and a catalog, which takes far longer.
        """
        if self._config.endpoints.simulator != EMBEDDED:
            return self.simulator.plan_training_memory
        from foretoken.simulator.training.memory_plan import plan_memory

        return plan_memory

    @cached_property
    def profiler(self) -> ProfilerPort:
        """The profiler; an embedded one records into this composition's catalog."""
        if self._config.endpoints.profiler != EMBEDDED:
            from foretoken.client.services import ProfilerClient

            return ProfilerClient(self._connect("profiler", self._config.endpoints.profiler))
        section = dict(self._config.profiler)
        place, cluster = section.pop("place", _LOCAL), section.pop("kubernetes", {})
        if place not in PROFILER_PLACES:
            known = ", ".join(PROFILER_PLACES)
            raise InvalidRequestError.of_field(
                "profiler.place", f"is one of {known}, not {place!r}"
            )
        if place == _KUBERNETES:
            return self._cluster_profiler(section, cluster)
        with _needing_extra("profiler"):
            from foretoken.profiler.config import ProfilerConfig
            from foretoken.profiler.service import ProfilerService

        config = _section(ProfilerConfig, section, self._state("profiler"), "profiler")
        return self._open(ProfilerService(config, self.catalog))

    def _cluster_profiler(
        self, section: Mapping[str, Any], cluster: Mapping[str, Any]
    ) -> ProfilerPort:
        """Return the profiler whose pods record into the catalog this process uses, too."""
        with _needing_extra("kubernetes"):
            from foretoken.profiler.cluster.service import ClusterProfiler
            from foretoken.profiler.cluster.spec import SECRET_FILES, KubernetesSpec, PodSetup

        spec = schema.decode(KubernetesSpec, cluster, "profiler.kubernetes")
        address = spec.catalog or self._config.endpoints.catalog
        if EMBEDDED in {address, self._config.endpoints.catalog}:
            raise InvalidRequestError.of_field(
                "endpoints.catalog",
                "pods cannot record in a catalog inside this process: run `foretoken serve catalog`"
                " where they reach it, and name it: --endpoint catalog=HOST:PORT",
            )
        client = self._config.channel_options(address)
        files = {key: str(getattr(client, name)) for key, name in SECRET_FILES.items()}
        setup = PodSetup(
            catalog=address,
            uses_tls=client.use_tls,
            credentials={key: _read(name) for key, name in files.items() if name},
            profiler=section,
        )
        folder = self._config.home_path / "profiler"

        def outline(request: ProfileRequest) -> ProfileOutline:
            with _needing_extra("profiler"):
                from foretoken.profiler.config import ProfilerConfig
                from foretoken.profiler.service import ProfilerService

            config = _section(ProfilerConfig, section, self._state("profiler"), "profiler")
            return ProfilerService(config, self.catalog).outline_profile(request)

        sharing = self._share("profiler", spec.job_lease_s) if spec.shares_jobs else None
        return self._open(ClusterProfiler(spec, setup, self.catalog, folder, outline, sharing))

    def foretoken(self, *names: str) -> Foretoken:
        """Return the facade over the named services; those not named are not started."""
        from foretoken.client.facade import Foretoken

        return Foretoken(**{name: getattr(self, name) for name in names})

    def _open(self, service: S) -> S:
        service.open()
        self._opened.callback(service.close)
        return service

    def _connect(self, service: str, address: str) -> Connection:
        from foretoken.client.channel import Connection

        connection = Connection(self._config.channel_options(address), service).open()
        self._opened.callback(connection.close)
        return connection

    def _connect_inside(self, address: str) -> tuple[CatalogAdminPort, Callable[[], None]]:
        """Return a client of a catalog on this machine, and what closes it."""
        from foretoken.client.channel import Connection
        from foretoken.client.services import CatalogClient

        connection = Connection(self._config.channel_options(address).in_the_clear(), "catalog")
        return CatalogClient(connection.open()), connection.close

    def _share(self, service: str, lease_s: float) -> SharedJobs:
        from foretoken.jobs.sharing import SharedJobs

        return SharedJobs(self.catalog, service, lease_s=lease_s)

    def _state(self, service: str) -> dict[str, str]:
        return {"state_folder": str(self._config.home_path / service)}


def _new_catalog(settings: CatalogConfig) -> CatalogService:
    from foretoken.catalog.service import CatalogService

    return CatalogService(settings)


@contextmanager
def _needing_extra(extra: str) -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as err:
        raise InvalidRequestError(
            f"an embedded profiler needs {err.name}: pip install 'foretoken[{extra}]',"
            " or say where one serves: --endpoint profiler=HOST:PORT"
        ) from err


def catalog_config(config: AppConfig) -> CatalogConfig:
    """Return the configuration of this process's own catalog.

    Raises:
        InvalidRequestError: the catalog is another process's, or its section is wrong.

    """
    from foretoken.catalog.config import CatalogConfig

    if config.endpoints.catalog != EMBEDDED:
        raise InvalidRequestError.of_field(
            "endpoints.catalog", f"the catalog is at {config.endpoints.catalog}: do this there"
        )
    defaults = {
        "path": str(config.home_path / "catalog.duckdb"),
        "state_folder": str(config.home_path / "catalog"),
    }
    return _section(CatalogConfig, config.catalog, defaults, "catalog")


def restore_catalog(
    config: AppConfig, backup: Path, *, is_replacing: bool
) -> tuple[Path, Path | None]:
    """Make a backup the catalog of this process; return its path and that of the one replaced.

    Raises:
        as `catalog_config` and `restore_backup`.

    """
    target = Path(catalog_config(config).path)
    from foretoken.catalog.upkeep.backup import restore_backup

    return target, restore_backup(backup, target, is_replacing=is_replacing)


def recover_catalog(config: AppConfig, *, is_accepting_loss: bool) -> tuple[Path, Recovery]:
    """Look for what the catalog of this process lacks; return its path and what was done.

    Raises:
        InvalidRequestError: it is a lake.
        as `catalog_config` and the catalog's `recover_catalog`.

    """
    settings = catalog_config(config)
    if settings.lake is not None:
        raise InvalidRequestError.of_field(
            "catalog.lake", "is recovered with PostgreSQL's own tools: it has the catalog's log"
        )
    target = Path(settings.path)
    from foretoken.catalog.upkeep import recovery

    now = datetime.now(UTC)
    return target, recovery.recover_catalog(target, now, is_accepting_loss=is_accepting_loss)


def on_kubernetes(config: AppConfig, num_shards: int = 0) -> AppConfig:
    """Return a configuration whose profiler runs in `num_shards` pods (0: as configured)."""
    cluster = dict(config.profiler.get("kubernetes", {}))
    if num_shards:
        cluster["num_shards"] = num_shards
    return replace(
        config, profiler={**config.profiler, "place": _KUBERNETES, "kubernetes": cluster}
    )


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as err:
        raise InvalidRequestError.of_field("client", f"cannot read {path}: {err.strerror}") from err


def _section(cls: type[C], given: Mapping[str, Any], defaults: Mapping[str, Any], name: str) -> C:
    return schema.decode(cls, {**defaults, **given}, name)
