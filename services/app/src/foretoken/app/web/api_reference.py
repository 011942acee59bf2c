"""The reference of the HTTP API in the documents, made of the protos as OpenAPI describes them.

`python -m foretoken.app.web.api_reference CALLS MESSAGES` writes the list of calls into one page,
and all messages with their fields into another.
"""

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from foretoken.app.config import SERVICES
from foretoken.app.web.api import PREFIX, has_get, is_bytes
from foretoken.app.web.calls import rpcs_of
from foretoken.app.web.openapi import comment_of, describe_api, rpc_name
from foretoken.app.web.uploads import UPLOADS
from foretoken.wire.rpc import RpcMessages, Table

_BEGIN, _END = "<!-- calls: made by `make docs` -->", "<!-- end of calls -->"
_MESSAGES: Final = "http-api-messages.md"
_PACKAGE: Final = "foretoken.api."
_HEAD: Final = """# Messages of calls over HTTP

Every field that a [call](http-api.md) takes or answers, as the [protos](../../proto/README.md) have
it; made by `make docs`. What has a message as its type is an object of that message's fields; `[]`
is a list, `{}` an object by names of the caller's choice.
"""


def render_calls(text: str) -> str:
    """Return the page with its list of calls made anew."""
    before, _, rest = text.partition(f"{_BEGIN}\n")
    _, _, after = rest.partition(_END)
    lines = [line for service in SERVICES for line in _list_calls(service)]
    return "".join([before, f"{_BEGIN}\n", *(f"{line}\n" for line in lines), _END, after])


def _list_calls(service: str) -> Iterable[str]:
    yield f"\n### {service}\n"
    yield "| call | GET | right | takes | answers | what |"
    yield "|---|---|---|---|---|---|"
    for name, messages in rpcs_of(service).items():
        first = re.split(r"(?<=\.)\s", comment_of(rpc_name(messages)))[0]
        has_query = "yes" if has_get(messages) else ""
        yield (
            f"| `{PREFIX}/{service}/{name}` | {has_query} | {messages.line.right.value} |"
            f" {_link_request(messages)} | {_link_reply(messages)} | {first} |"
        )


def _link_request(messages: RpcMessages) -> str:
    if messages.line.name in UPLOADS:
        first: Any = messages.request_class.DESCRIPTOR.fields[0]
        return f"bytes, `?{first.name}=`{_link(first.message_type.full_name)}"
    return _link(messages.request_class.DESCRIPTOR.full_name)


def _link_reply(messages: RpcMessages) -> str:
    if isinstance(messages.line, Table):
        return "rows"
    if is_bytes(messages):
        return "bytes"
    linked = _link(messages.reply_class.DESCRIPTOR.full_name)
    return f"stream of {linked}" if messages.kind.endswith("_stream") else linked


def _link(full_name: str, page: str = _MESSAGES) -> str:
    title = _title(full_name)
    return f"[{title}]({page}#{title.lower().replace('.', '')})"


def _title(full_name: str) -> str:
    """Return a message's name, with the service whose alone it is."""
    *package, name = full_name.removeprefix(_PACKAGE).split(".")
    return f"{package[0]}.{name}" if package and package[0] != "types" else name


def render_messages() -> str:
    """Return the page of all messages, by name."""
    schemas: Mapping[str, Any] = describe_api()["components"]["schemas"]
    found = {_title(full_name): schema for full_name, schema in schemas.items()}
    lines = [line for name in sorted(found) for line in _describe(name, found[name])]
    return "".join([_HEAD, *(f"{line}\n" for line in lines)])


def _describe(name: str, schema: Mapping[str, Any]) -> Iterator[str]:
    yield f"\n## {name}\n"
    if schema.get("description"):
        yield schema["description"]
    fields: Mapping[str, Any] = schema.get("properties", {})
    if not fields:
        return
    yield "\n| field | type | what |\n|---|---|---|"
    for field, said in fields.items():
        what = said.get("description", "").replace("|", "\\|").replace("\n", " ")
        yield f"| `{field}` | {_type_of(said)} | {what} |"


def _type_of(said: Mapping[str, Any]) -> str:
    if "$ref" in said:
        return _link(said["$ref"].rpartition("/")[2], page="")
    if said.get("type") == "array":
        return f"{_type_of(said['items'])}[]"
    if isinstance(said.get("additionalProperties"), Mapping):
        return f"{{}} of {_type_of(said['additionalProperties'])}"
    if "enum" in said:
        return "one of " + ", ".join(f"`{value}`" for value in said["enum"])
    if "contentEncoding" in said:
        return str(said["contentEncoding"])
    return str(said["type"])


if __name__ == "__main__":
    calls, messages_page = map(Path, sys.argv[1:])
    calls.write_text(render_calls(calls.read_text(encoding="utf-8")), encoding="utf-8")
    messages_page.write_text(render_messages(), encoding="utf-8")
