"""The messages of an rpc: made of a method's arguments and results, and taken apart again."""

import dataclasses
import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, cast

from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from foretoken.domain.errors import InvalidRequestError
from foretoken.wire import codec
from foretoken.wire.rpc import Form, Rpc, RpcTable, Unary

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
        forms = line if isinstance(line, Unary) else Unary(line.method)
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
