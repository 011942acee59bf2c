"""The description of `/v1` in OpenAPI 3.1, made of the protos and the table of rpcs."""

import json
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.resources import files
from typing import Any, Final

from google.protobuf.descriptor import FieldDescriptor

from foretoken import __version__
from foretoken.app.config import SERVICES
from foretoken.app.web.api import PREFIX, has_get, is_bytes
from foretoken.app.web.calls import rpcs_of
from foretoken.app.web.problem import MEDIA_TYPE
from foretoken.app.web.rows import FORMATS
from foretoken.app.web.uploads import UPLOADS
from foretoken.wire.message_json import Field, MessageType
from foretoken.wire.rpc import RpcMessages, Table

_JSON: Final = "application/json"
_BYTES: Final = "application/octet-stream"
_LINES: Final = "application/x-ndjson"
_EVENTS: Final = "text/event-stream"
_NUMBERS: Final = {
    FieldDescriptor.TYPE_INT64: {"type": "integer", "format": "int64"},
    FieldDescriptor.TYPE_INT32: {"type": "integer", "format": "int32"},
    FieldDescriptor.TYPE_DOUBLE: {"type": "number", "format": "double"},
    FieldDescriptor.TYPE_FLOAT: {"type": "number", "format": "float"},
    FieldDescriptor.TYPE_BOOL: {"type": "boolean"},
    FieldDescriptor.TYPE_STRING: {"type": "string"},
    FieldDescriptor.TYPE_BYTES: {"type": "string", "contentEncoding": "base64"},
}


def describe_api(services: Iterable[str] = SERVICES) -> dict[str, Any]:
    """Return the document of what a server of these services answers."""
    schemas: dict[str, Any] = {"Problem": _PROBLEM}
    paths: dict[str, Any] = {}
    for service in services:
        for name, messages in rpcs_of(service).items():
            paths[f"{PREFIX}/{service}/{name}"] = _describe_path(service, messages, schemas)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Foretoken",
            "version": __version__,
            "description": "What an LLM deployment will cost in time, memory and money. Work longer"
            " than some ten seconds is a job: create_... returns at once, watch_job streams its"
            " progress, get_..._report has its result.",
        },
        "paths": paths,
        "components": {
            "schemas": dict(sorted(schemas.items())),
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"token": []}],
    }


_PROBLEM: Final = {
    "type": "object",
    "description": "Why a request was not answered (RFC 9457); `reason` is stable.",
    "required": ["status", "reason", "detail"],
    "properties": {
        "status": {"type": "integer"},
        "reason": {"type": "string"},
        "detail": {"type": "string"},
        "errors": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"field": {"type": "string"}, "detail": {"type": "string"}},
            },
        },
        "details": {"type": "object", "additionalProperties": {"type": "string"}},
        "retry_after_s": {"type": "number"},
    },
}


@cache
def _comments() -> Mapping[str, str]:
    text = (files("foretoken.api") / "comments.json").read_text(encoding="utf-8")
    found: Mapping[str, str] = json.loads(text)
    return found


def comment_of(full_name: str) -> str:
    """Return what the protos say of something by its full name."""
    return _comments().get(full_name, "")


def rpc_name(messages: RpcMessages) -> str:
    """Return the full name of an rpc, as the protos have it."""
    return messages.path.strip("/").replace("/", ".")


def _describe_path(service: str, messages: RpcMessages, schemas: dict[str, Any]) -> dict[str, Any]:
    request = messages.request_class.DESCRIPTOR
    shared: dict[str, Any] = {
        "tags": [service],
        "description": f"Needs the right `{messages.line.right.value}`.",
        "summary": comment_of(rpc_name(messages)),
        "responses": {
            "200": {"description": "The answer.", "content": _answers(messages, schemas)},
            "default": {
                "description": "What is wrong.",
                "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
            },
        },
    }
    post = {**shared, "operationId": f"{service}_{messages.line.name}"}
    if messages.line.name in UPLOADS:
        first, _ = request.fields
        post["parameters"] = [
            {
                "name": first.name,
                "in": "query",
                "required": True,
                "description": comment_of(first.full_name),
                "content": {_JSON: {"schema": _schema_of(first, schemas)}},
            }
        ]
        post["requestBody"] = {"required": True, "content": {_BYTES: {"schema": {}}}}
        return {"post": post}
    post["requestBody"] = {"content": {_JSON: {"schema": _refer(request, schemas)}}}
    if not has_get(messages):
        return {"post": post}
    parameters = [
        {
            "name": field.name,
            "in": "query",
            "description": comment_of(field.full_name),
            "schema": _schema_of(field, schemas),
        }
        for field in request.fields
        if field.message_type is None
    ]
    get = {**shared, "operationId": f"{service}_{messages.line.name}_get", "parameters": parameters}
    return {"get": get, "post": post}


def _answers(messages: RpcMessages, schemas: dict[str, Any]) -> dict[str, Any]:
    if isinstance(messages.line, Table):
        rows = {"type": "array", "items": {"type": "object"}}
        return {media: {"schema": rows if media == _JSON else {}} for media in FORMATS}
    if is_bytes(messages):
        return {_BYTES: {"schema": {}}}
    schema = {"schema": _refer(messages.reply_class.DESCRIPTOR, schemas)}
    if messages.kind.endswith("_stream"):
        return {_LINES: schema, _EVENTS: schema}
    return {_JSON: schema}


def _refer(message: MessageType, schemas: dict[str, Any]) -> dict[str, Any]:
    """Return a reference to a message's schema, which is added with those it holds."""
    name = message.full_name.removeprefix("foretoken.api.")
    if name not in schemas:
        schemas[name] = {}
        properties = {field.name: _describe(field, schemas) for field in message.fields}
        schemas[name] = {
            "type": "object",
            "description": comment_of(message.full_name),
            "properties": properties,
            "additionalProperties": False,
        }
    return {"$ref": f"#/components/schemas/{name}"}


def _describe(field: Field, schemas: dict[str, Any]) -> dict[str, Any]:
    return {**_schema_of(field, schemas), "description": comment_of(field.full_name)}


def _schema_of(field: Field, schemas: dict[str, Any]) -> dict[str, Any]:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        values = field.message_type.fields_by_name["value"]
        return {"type": "object", "additionalProperties": _item_of(values, schemas)}
    item = _item_of(field, schemas)
    return {"type": "array", "items": item} if field.is_repeated else item


def _item_of(field: Field, schemas: dict[str, Any]) -> dict[str, Any]:
    if field.message_type is not None:
        return _refer(field.message_type, schemas)
    if field.enum_type is not None:
        return {"type": "string", "enum": [value.name for value in field.enum_type.values]}
    return dict(_NUMBERS[field.type])
