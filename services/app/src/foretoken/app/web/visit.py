"""One request for a page: who makes it, and the services with that caller's rights."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from foretoken.app.access import Access
from foretoken.app.web.calls import Caller, OfferedServices, rpcs_of
from foretoken.app.web.imports import Imports
from foretoken.app.web.warm_ups import WarmUps
from foretoken.domain.ports import CatalogAdminPort, PredictorPort, SimulatorPort
from foretoken.wire.rights import Right


class GuardedPort:
    """A port whose methods need the rights of their rpcs."""

    def __init__(
        self, service: str, offered: OfferedServices, access: Access, caller: Caller
    ) -> None:
        """Keep who calls; the service is opened with the first call."""
        self._service = service
        self._offered = offered
        self._access = access
        self._caller = caller

    def __getattr__(self, name: str) -> Any:
        """Return a method of the port."""
        path = rpcs_of(self._service)[name].path

        def call(*args: Any, **named: Any) -> Any:
            with self._access.enter(path, self._caller.names, self._caller.peer):
                return getattr(self._offered.port(self._service), name)(*args, **named)

        return call


@dataclass(frozen=True, slots=True)
class Upload:
    """A file that was posted."""

    name: str
    content: bytes


@dataclass(frozen=True, kw_only=True)
class Visit:
    """What a page is made of; `place` holds the parts of its path, `form` what was posted."""

    path: str
    query: Mapping[str, list[str]]
    place: Mapping[str, str]
    form: Mapping[str, list[str]]
    uploads: Mapping[str, Upload]
    caller: Caller
    access: Access
    offered: OfferedServices
    imports: Imports
    warm_ups: WarmUps

    @cached_property
    def catalog(self) -> CatalogAdminPort:
        """The catalog, as the caller may use it."""
        found: CatalogAdminPort = self.guard("catalog")
        return found

    @cached_property
    def predictor(self) -> PredictorPort:
        """The predictor, as the caller may use it."""
        found: PredictorPort = self.guard("predictor")
        return found

    @cached_property
    def simulator(self) -> SimulatorPort:
        """The simulator, as the caller may use it."""
        found: SimulatorPort = self.guard("simulator")
        return found

    @cached_property
    def asked(self) -> dict[str, str]:
        """The first value of every name in the query string."""
        return {name: values[0] for name, values in self.query.items()}

    @cached_property
    def posted(self) -> dict[str, str]:
        """The first value of every name that was posted."""
        return {name: values[0] for name, values in self.form.items()}

    def may(self, right: str) -> bool:
        """Return whether the caller has a right."""
        return self.access.allows(Right(right), self.caller.names)

    def first(self, name: str, default: str = "") -> str:
        """Return the first value of a name in the query string."""
        return self.asked.get(name, default)

    def guard(self, service: str) -> Any:
        """Return a service by name, as the caller may use it."""
        return GuardedPort(service, self.offered, self.access, self.caller)


@dataclass(frozen=True, kw_only=True)
class Shown:
    """A page: a template and what it is given."""

    template: str
    content: Mapping[str, Any] = field(default_factory=dict)
    status: int = 200


@dataclass(frozen=True, slots=True)
class Redirect:
    """Another page is to be looked at."""

    target: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Sent:
    """Something that is no page of ours: a file, or data."""

    body: bytes
    media: str
    file_name: str = ""
    policy: str = ""


def send_json(content: Any) -> Sent:
    """Return data for a script of a page."""
    body = json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return Sent(body=body.encode(), media="application/json")
