"""A web server of real services on a free loopback port, and requests to it."""

import http.client
import json
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretoken.app.compose import Composition
from foretoken.app.config import AppConfig, ServerConfig
from foretoken.app.serve import serve_web

# A model's config.json as one pastes it.
TINY_CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 256,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True)
class WebClient:
    port: int
    tls: ssl.SSLContext | None = None

    def send(self, method: str, path: str, body: bytes | str = b"", **headers: str) -> Answer:
        """Send one request; `_` in a header's name stands for `-`."""
        connection: http.client.HTTPConnection = (
            http.client.HTTPSConnection("127.0.0.1", self.port, timeout=60, context=self.tls)
            if self.tls
            else http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        )
        try:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, body or None, named)
            answer = connection.getresponse()
            return Answer(answer.status, dict(answer.headers), answer.read())
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> Answer:
        return self.send("GET", path, **headers)

    def post(self, path: str, content: Any, **headers: str) -> Answer:
        return self.send(
            "POST", path, json.dumps(content), **{"Content_Type": "application/json", **headers}
        )

    def call(self, rpc: str, **fields: Any) -> Any:
        """Return the reply of an rpc, such as `catalog/list_runs`, which must work."""
        answer = self.post(f"/v1/{rpc}", fields)
        assert (200, b"") == (answer.status, b"" if answer.status == 200 else answer.body)
        return answer.json


@contextmanager
def serve_home(
    home: Path,
    server: ServerConfig | None = None,
    services: tuple[str, ...] = ("catalog", "predictor", "simulator"),
    predictor: Mapping[str, Any] | None = None,
) -> Iterator[WebClient]:
    """Serve the services of a home over HTTP."""
    server_config = server or ServerConfig(http_port=0)
    # As a server that stays does, but for the processes that a search starts.
    simulator = {"resumes_at_start": True, "num_search_workers": 1}
    config = AppConfig(
        home=str(home), server=server_config, simulator=simulator, predictor=predictor or {}
    )
    with Composition(config) as composition:
        running = serve_web(config, services, composition)
        try:
            yield WebClient(running.port)
        finally:
            running.close()


def post_form(
    web: WebClient,
    path: str,
    fields: Mapping[str, str],
    headers: Mapping[str, str] | None = None,
    **files: str,
) -> Answer:
    """Send a form with files, each by the name of its field."""
    parts = [f'Content-Disposition: form-data; name="{k}"\r\n\r\n{v}' for k, v in fields.items()]
    parts += [
        f'Content-Disposition: form-data; name="{name}"; filename="{name}.csv"\r\n'
        f"Content-Type: text/csv\r\n\r\n{content}"
        for name, content in files.items()
    ]
    body = "".join(f"--edge\r\n{part}\r\n" for part in parts) + "--edge--\r\n"
    media = "multipart/form-data; boundary=edge"
    return web.send("POST", path, body.encode(), Content_Type=media, **(headers or {}))
