"""The description of the HTTP API is whole, and the examples of the documents work against it."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from web_client import WebClient

from foretoken.app.web.api_reference import render_calls, render_messages
from foretoken.app.web.openapi import describe_api
from foretoken.wire.rpcs import TABLES

_PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "http-api.md"
_BLOCKS = re.findall(
    r"^```(\w+) http\n(.*?)^```", _PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL
)
_PROGRAMS = {
    "sh": ["bash", "-euo", "pipefail", "-c"],
    "python": [sys.executable, "-c"],
    "js": ["node", "--input-type=module", "--eval"],
    "go": ["go", "run"],
}


def _references(place: Any) -> Iterator[str]:
    if isinstance(place, dict):
        if "$ref" in place:
            yield place["$ref"]
        for value in place.values():
            yield from _references(value)
    elif isinstance(place, list):
        for value in place:
            yield from _references(value)


def test_every_rpc_and_every_message_is_described() -> None:
    document = describe_api()
    rpcs = {f"/v1/{table.short_name()}/{name}" for table in TABLES for name in table.lines()}
    schemas = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    operations = [way for path in document["paths"].values() for way in path.values()]
    names = [way["operationId"] for way in operations]
    assert rpcs == set(document["paths"])
    assert schemas == set(_references(document)) | {"#/components/schemas/Problem"}
    assert len(set(names)) == len(names)
    assert [] == [way["operationId"] for way in operations if not way["summary"]]


def test_a_server_describes_what_it_answers(web: WebClient) -> None:
    document = web.get("/v1/openapi.json").json
    assert {"catalog", "predictor", "simulator"} == {
        path.split("/")[2] for path in document["paths"]
    }
    answered = {path: web.post(path, {}).status for path in document["paths"] if "/list_" in path}
    assert {200, 400} >= set(answered.values())


def test_a_reply_has_the_fields_of_its_schema(web: WebClient) -> None:
    schemas = web.get("/v1/openapi.json").json["components"]["schemas"]
    reply = web.call("simulator/list_definitions", kind="devices", page_size=1)
    expected = schemas["simulator.v1.ListDefinitionsResponse"]["properties"]
    assert set(expected) == set(reply)
    assert set(schemas["simulator.v1.Definition"]["properties"]) == set(reply["definitions"][0])


def test_the_page_lists_the_calls_there_are() -> None:
    """When this fails, run `make docs`."""
    text = _PAGE.read_text("utf-8")
    assert render_calls(text) == text


def test_the_page_of_messages_has_every_field_there_is() -> None:
    """When this fails, run `make docs`. What a link leads to is there, once."""
    text = _PAGE.with_name("http-api-messages.md").read_text("utf-8")
    assert render_messages() == text
    schemas = describe_api()["components"]["schemas"].values()
    assert sum(len(one.get("properties", {})) for one in schemas) == text.count("\n| `")
    anchors = [
        name.lower().replace(".", "") for name in re.findall(r"^## (.+)$", text, re.MULTILINE)
    ]
    assert len(set(anchors)) == len(anchors)
    linked = re.findall(r"messages.md#(\w+)\)", _PAGE.read_text("utf-8"))
    assert set(linked) | set(re.findall(r"\(#(\w+)\)", text)) <= set(anchors)


@pytest.mark.slow
@pytest.mark.parametrize(("language", "text"), _BLOCKS, ids=[language for language, _ in _BLOCKS])
def test_examples_of_the_documents_run(
    language: str, text: str, web: WebClient, tmp_path: Path
) -> None:
    program = _PROGRAMS[language]
    needed = {"sh": "curl"}.get(language, program[0])
    if shutil.which(needed) is None:
        pytest.skip(f"{needed} is not on this machine")
    if language == "go":
        # Of go, programs are files.
        (tmp_path / "main.go").write_text(text, encoding="utf-8")
        text = "main.go"
    environment = {**os.environ, "FORETOKEN_URL": f"http://127.0.0.1:{web.port}"}
    done = subprocess.run(
        [*program, text],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (0, "") == (done.returncode, done.stderr if done.returncode else "")


def test_a_named_model_is_refused_by_the_name_that_was_written(web: WebClient) -> None:
    scenario = {"model_ref": "llama-3.1-9b", "device": "h100_sxm"}
    refused = web.post("/v1/simulator/create_serving_simulation", {"scenario": scenario})
    assert [400, "scenario.model_ref"] == [refused.status, refused.json["errors"][0]["field"]]
    assert "llama-3.1-8b" in json.dumps(refused.json)
