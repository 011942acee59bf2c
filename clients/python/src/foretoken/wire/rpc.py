"""One line for one rpc: how it travels, its messages, what a client may do about losses.

The proto says how an rpc is called and what messages it takes, the port's signature what they hold,
and a line adds what neither says. The methods of both clients and of the servicer, the retry list
and the server's budgets are made of lines.
"""

import dataclasses
import inspect
import typing
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
from functools import cache
from importlib import import_module
from operator import attrgetter
from typing import Any, ClassVar, Concatenate, Generic, ParamSpec, Self, TypeVar, cast, overload

import pyarrow as pa
from google.protobuf.descriptor import (
    Descriptor,
    FieldDescriptor,
    MethodDescriptor,
    ServiceDescriptor,
)
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.measurements.measurement import ArrowStream
from foretoken.wire import codec
from foretoken.wire.rights import Right

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

    Callers need a `right` to it. Clients call an `is_idempotent` one again where the service cannot
    be reached. A server runs `budget` of its calls at once (0: as many as of any method).
    """

    method: Callable[Concatenate[Any, P], R]
    right: Right
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
    that is too large for one message and joins the replies. `weigh` says about how many rows a
    request's message is, of calls that may be large.
    """

    is_long: bool = False
    field: str = ""
    weigh: Callable[[Any], int] | None = None
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


# What a page of a list is requested with, in addition to the parameters of the method.
_PAGE_FIELDS = {"page_size", "page_token", "next_page_token"}


class RpcMessages:
    """How the arguments and the result of one method travel."""

    def __init__(self, line: Rpc[..., Any], method: MethodDescriptor) -> None:
        """Derive it from the method's signature and the proto.

        Raises:
            TypeError: the signature and the proto do not fit each other.

        """
        self.line = line
        self.path = f"/{method.containing_service.full_name}/{method.name}"
        sides = (method.client_streaming, method.server_streaming)
        self.kind = "_".join("stream" if is_stream else "unary" for is_stream in sides)
        self.request_class: type[Message] = GetMessageClass(method.input_type)
        self.reply_class: type[Message] = GetMessageClass(method.output_type)
        self._signature = inspect.signature(line.method)
        self._names = tuple(self._signature.parameters)[1:]
        hints = typing.get_type_hints(line.method)
        forms = line if isinstance(line, Unary) else Unary(line.method, line.right)
        if method.client_streaming:
            return
        self._arguments = _arguments(self._names, hints, method.input_type, forms)
        self._reply = forms.reply or _reply_form(hints["return"], method.output_type)

    def bind(self, args: Sequence[Any], named: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return the values of all parameters, in order.

        Raises:
            TypeError: they are not what the method takes.

        """
        if not named and len(args) == len(self._names):
            return tuple(args)
        bound = self._signature.bind(None, *args, **named)
        bound.apply_defaults()
        return bound.args[1:]

    def encode_request(self, values: Sequence[Any], **fields: Any) -> Any:
        """Return the request's message, with further fields of it."""
        for argument, value in zip(self._arguments, values, strict=True):
            if not argument.field:
                return argument.form.encode(value)
            fields[argument.field] = argument.form.encode(value)
        return self.request_class(**fields)

    def decode_request(self, message: Any) -> list[Any]:
        """Return the values of all parameters, in order.

        Raises:
            InvalidRequestError: the message lacks one, or holds what the domain does not know.

        """
        return [argument.take(message) for argument in self._arguments]

    def encode_reply(self, value: Any, request: Any) -> Any:
        """Return the message of what the method returned, or of one item of it."""
        return self._reply.encode(value, request)

    def decode_reply(self, message: Any, values: Sequence[Any]) -> Any:
        """Return what the method returned, or one item of it, of the values it was called with."""
        return self._reply.decode(message, *values)


@dataclasses.dataclass(frozen=True, slots=True)
class _Argument:
    """How one parameter travels: in a field, or as the whole message where `field` is empty."""

    field: str
    form: Form
    is_required: bool

    def take(self, message: Any) -> Any:
        if not self.field:
            return self.form.decode(message)
        if self.is_required and not message.HasField(self.field):
            raise InvalidRequestError.of_field(self.field, "must be set")
        return self.form.decode(getattr(message, self.field))


def messages_of(table: type[RpcTable]) -> Mapping[str, RpcMessages]:
    """Return the messages of all rpcs of a service, by the names of the methods.

    Raises:
        TypeError: the table and the proto do not have the same rpcs.

    """
    return _derive(cast("type", table))


@cache
def _derive(table: Any) -> Mapping[str, RpcMessages]:
    methods, lines = table.descriptor().methods_by_name, table.lines()
    named = {line.rpc_name for line in lines.values()}
    if set(methods) != named:
        differing = ", ".join(sorted(set(methods) ^ named))
        raise TypeError(f"{table.__name__} and {table.service} differ in {differing}")
    return {name: RpcMessages(line, methods[line.rpc_name]) for name, line in lines.items()}


def _arguments(
    names: Sequence[str], hints: Mapping[str, Any], request: Descriptor, line: "Unary[..., Any]"
) -> list[_Argument]:
    if line.field:
        return [_field_argument(line.field, hints[names[0]], request, line.request)]
    known = request.fields_by_name
    if len(names) == 1 and names[0] not in known:
        form = line.request or _mirror(hints[names[0]], request)
        return [_Argument("", form, is_required=False)]
    return [_field_argument(name, hints[name], request, line.request) for name in names]


def _field_argument(name: str, hint: Any, request: Descriptor, given: Form | None) -> _Argument:
    field = request.fields_by_name.get(name)
    if field is None:
        raise TypeError(f"{request.full_name} has no field {name}; add it to the proto")
    if field.message_type is None:
        return _Argument(name, _AS_IT_IS, is_required=False)
    is_required = any(
        one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING
        for one in dataclasses.fields(hint)
    )
    return _Argument(name, given or _mirror(hint, field.message_type), is_required)


def _reply_form(hint: Any, reply: Descriptor) -> Form:
    """Return how a result of that type travels, or the items of a stream."""
    reply_class: Callable[..., Message] = GetMessageClass(reply)
    if hint is type(None):
        return Form(lambda *_: reply_class(), lambda *_: None)
    (item, *_) = typing.get_args(hint) or (hint,)
    if typing.get_origin(hint) is tuple or not dataclasses.is_dataclass(item):
        field = _only_field(reply)
        name, one = field.name, _item_form(item, field)
        if typing.get_origin(hint) is not tuple:
            return Form(
                lambda value, _: reply_class(**{name: value}),
                lambda message, *_: getattr(message, name),
            )
        return Form(
            lambda values, _=None: reply_class(**{name: [one.encode(value) for value in values]}),
            lambda message, *_: tuple(one.decode(each) for each in getattr(message, name)),
        )
    return _mirror(item, reply)


def _only_field(message: Descriptor) -> FieldDescriptor:
    fields = [field for field in message.fields if field.name not in _PAGE_FIELDS]
    if len(fields) != 1:
        raise TypeError(f"{message.full_name} has {len(fields)} fields, not one for a list")
    return fields[0]


def _item_form(item: Any, field: FieldDescriptor) -> Form:
    return _AS_IT_IS if field.message_type is None else _mirror(item, field.message_type)


def _mirror(cls: Any, message: Descriptor) -> Form:
    message_class = GetMessageClass(message)
    return Form(
        lambda value, *_: codec.encode(value, message_class),
        lambda found, *_: codec.decode(found, cls),
    )


_AS_IT_IS = Form(lambda value, *_: value, lambda value, *_: value)
