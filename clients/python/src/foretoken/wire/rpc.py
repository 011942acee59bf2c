"""One line for one rpc: a method of a port, how it travels, and what a client may do about losses.

The proto says how an rpc is called and what messages it takes, the port's signature what they hold,
and a line adds what neither says. The methods of both clients and of the servicer, the retry list
and the server's budgets are made of lines.
"""

from collections.abc import (
    AsyncIterator,
    Callable,
    Coroutine,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import KW_ONLY, dataclass
from importlib import import_module
from operator import attrgetter
from typing import Any, ClassVar, Concatenate, Generic, ParamSpec, Self, TypeVar, overload

import pyarrow as pa
from google.protobuf.descriptor import ServiceDescriptor

from foretoken.domain.measurements.measurement import ArrowStream

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class Blocking:
    """A client whose methods return what the port's do."""


class Awaited:
    """A client whose methods are awaited, or iterated over with `async for`."""


@dataclass(frozen=True, eq=False)
class Rpc(Generic[P, R]):
    """A method of a port that another process answers.

    gRPC itself calls an `is_idempotent` one again where the service cannot be reached. A server
    runs `budget` of its calls at once (0: as many as of any method).
    """

    method: Callable[Concatenate[Any, P], R]
    _: KW_ONLY
    is_idempotent: bool = False
    budget: int = 0

    @property
    def name(self) -> str:
        """The port's name of it, which the proto writes in camel case."""
        return self.method.__name__

    @property
    def rpc_name(self) -> str:
        """The proto's name of it."""
        return "".join(word.capitalize() for word in self.name.split("_"))


@dataclass(frozen=True, eq=False)
class Form:
    """How a value travels that its message does not mirror field by field.

    `encode` takes the value and, of a reply, the request's message; `decode` takes the message and,
    of a reply, the request's value.
    """

    encode: Callable[..., Any]
    decode: Callable[..., Any]


@dataclass(frozen=True, eq=False)
class Unary(Rpc[P, R]):
    """One request, one reply.

    An `is_long` one reads many rows and may take as long as a stream. `field` of the request's
    message holds the only parameter, where it has not the parameter's name. `parts` cuts a request
    that is too large for one message and joins the replies.
    """

    is_long: bool = False
    field: str = ""
    request: Form | None = None
    reply: Form | None = None
    parts: "Parts | None" = None

    @overload
    def __get__(self, client: None, owner: object) -> Self: ...
    @overload
    def __get__(self, client: Blocking, owner: object) -> Callable[P, R]: ...
    @overload
    def __get__(self, client: Awaited, owner: object) -> Callable[P, Coroutine[Any, Any, R]]: ...
    def __get__(self, client: object, owner: object) -> Any:
        """Return the line; clients have a method in its place."""
        return self


@dataclass(frozen=True, eq=False)
class Parts:
    """How a request is cut, and its replies are joined, which must all have the same `version`."""

    cut: Callable[[Any], Iterable[Any]]
    join: Callable[[Any, Sequence[Any]], Any]
    version: Callable[[Any], str]


@dataclass(frozen=True, eq=False)
class Pages(Unary[P, R]):
    """One list, which travels in pages; `key` is the attribute that tells its items apart."""

    _: KW_ONLY
    key: str

    def identify(self, item: Any) -> str:
        """Return what tells an item apart."""
        return str(attrgetter(self.key)(item))


@dataclass(frozen=True, eq=False)
class Report(Unary[P, R]):
    """One report, whose columns are fetched from `tables`, if it has any."""

    _: KW_ONLY
    tables: "Table[[str, str]]"
    has_tables: Callable[[R], bool] = lambda _: True


@dataclass(frozen=True, eq=False)
class Table(Rpc[P, ArrowStream]):
    """One request, rows in answer; with asyncio all of them at once."""

    @overload
    def __get__(self, client: None, owner: object) -> Self: ...
    @overload
    def __get__(self, client: Blocking, owner: object) -> Callable[P, pa.RecordBatchReader]: ...
    @overload
    def __get__(
        self, client: Awaited, owner: object
    ) -> Callable[P, Coroutine[Any, Any, pa.Table]]: ...
    def __get__(self, client: object, owner: object) -> Any:
        """Return the line; clients have a method in its place."""
        return self


@dataclass(frozen=True, eq=False)
class Stream(Rpc[P, Iterator[T]], Generic[P, T]):
    """One request, items in answer."""

    @overload
    def __get__(self, client: None, owner: object) -> Self: ...
    @overload
    def __get__(self, client: Blocking, owner: object) -> Callable[P, Generator[T]]: ...
    @overload
    def __get__(self, client: Awaited, owner: object) -> Callable[P, AsyncIterator[T]]: ...
    def __get__(self, client: object, owner: object) -> Any:
        """Return the line; clients have a method in its place."""
        return self


@dataclass(frozen=True, eq=False)
class Watch(Stream[P, T]):
    """Items as they come; a stream that breaks is taken up where it broke, by `first`."""


@dataclass(frozen=True, eq=False)
class States(Stream[P, T]):
    """The states of a job until it is final, over as many streams as it takes."""


@dataclass(frozen=True, eq=False)
class ByHand(Rpc[..., Any]):
    """An rpc whose request is a stream: clients and the servicer have methods written for it."""

    def __get__(self, client: object, owner: object) -> Any:
        """Return the line; clients have a method in its place."""
        return self


class RpcTable:
    """The rpcs of a service, a line each; `service` is its full name in the protos."""

    service: ClassVar[str]

    def __init_subclass__(cls, service: str = "", **options: Any) -> None:
        """Check that lines have the names of their methods."""
        super().__init_subclass__(**options)
        if service:
            cls.service = service
        for name, line in vars(cls).items():
            if isinstance(line, Rpc) and line.name != name:
                raise TypeError(f"{cls.__name__}.{name} is of the method {line.name}")

    @classmethod
    def lines(cls) -> Mapping[str, Rpc[..., Any]]:
        """Return the lines by name."""
        classes = reversed(cls.__mro__)
        return {
            name: line
            for owner in classes
            for name, line in vars(owner).items()
            if isinstance(line, Rpc)
        }

    @classmethod
    def short_name(cls) -> str:
        """Return what people call the service: "catalog"."""
        return cls.service.split(".")[-3]

    @classmethod
    def descriptor(cls) -> ServiceDescriptor:
        """Return what the protos say of the service; its stubs are imported here."""
        package, _, name = cls.service.rpartition(".")
        module: Any = import_module(f"{package}.{cls.short_name()}_service_pb2")
        descriptor: ServiceDescriptor = module.DESCRIPTOR.services_by_name[name]
        return descriptor
