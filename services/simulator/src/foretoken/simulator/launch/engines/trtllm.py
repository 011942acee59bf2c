"""TensorRT-LLM's server, and what stands before several.

Sources: TensorRT-LLM, `tensorrt_llm/commands/serve.py`, `llmapi/disagg_utils.py` and
`serve/router.py` (1.0 to 1.3), `examples/disaggregated/README.md`; nginx,
`ngx_http_upstream_module`. What the server is started with is in `trtllm_settings.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import Any

import yaml

from foretoken.domain.errors import FieldViolation, InvalidRequestError
from foretoken.domain.measurements.estimate import DType
from foretoken.simulator.launch.files import render
from foretoken.simulator.launch.options import (
    Fields,
    flatten,
    group_words,
    nest,
    split_words,
    text_arguments,
)
from foretoken.simulator.launch.server import (
    FILES_FOLDER,
    SERVER_HOST,
    SERVER_PORT,
    STARTUP_S,
    Launch,
    LaunchPool,
    Router,
    ServedOptions,
    ServingEngine,
    stand_in,
)
from foretoken.simulator.launch.trtllm_settings import (
    DRAFTING,
    FILE,
    GRAPHS,
    NEWEST,
    OFF,
    OPTIONS,
    RELEASES,
    find_release,
)

# Routers of `trtllm-serve disaggregated`, and nginx's ways to balance.
_POLICIES = {
    "round_robin": "round_robin",
    "least_outstanding": "load_balancing",
    "least_loaded": "load_balancing",
    "power_of_two": "load_balancing",
}
_BALANCED = {
    "round_robin": "round_robin",
    "random": "random",
    "power_of_two": "random two",
    "least_outstanding": "least_conn",
    "least_loaded": "least_conn",
}
# What the command does else than to serve a language model.
_OTHERS = (
    "disaggregated",
    "disaggregated_mpi_worker",
    "mm_embedding_serve",
    "embeddings",
    "rerank",
)
_PROXY = "nginxinc/nginx-unprivileged:stable"
_PROXIED = (
    "TensorRT-LLM has no router before replicas: nginx stands before them; restart it where a"
    " replica got another address"
)


def _check_said(served: ServedOptions, series: str) -> None:
    """Refuse what the server has no setting for."""
    is_settled = RELEASES[series].is_settled
    has_waits = served.batch_wait_iters or served.balance_timeout_iters
    checks = {
        "cluster.pools": (
            is_settled or served.role == "aggregated",
            f"pools of TensorRT-LLM {series} are not written: take 1.1 or newer",
        ),
        "engine.rules": (
            is_settled or not has_waits,
            f"waits for prompts of TensorRT-LLM {series} are not written: take 1.1 or newer",
        ),
        "engine.rules.decode_context_parallel": (
            series == NEWEST or served.decode_context_parallel == 1,
            f"TensorRT-LLM {series} splits no contexts over ranks: take {NEWEST}",
        ),
        "kv_dtype": (
            served.kv_dtype is not DType.INT8,
            "TensorRT-LLM's PyTorch backend keeps it in fp8 or nvfp4",
        ),
        "engine.rules.has_priority_scheduling": (
            not served.has_priority_scheduling,
            "trtllm-serve has no priorities: set it false",
        ),
    }
    violations = [FieldViolation(name, why) for name, (is_so, why) in checks.items() if not is_so]
    if violations:
        raise InvalidRequestError.of_violations(violations)


class TrtllmEngine(ServingEngine):
    """Starts `trtllm-serve`; before pools its own orchestrator, before others nginx."""

    name = "trtllm"
    label = "TensorRT-LLM"
    profile = "trtllm-1.3"
    made_at_load = ()
    options = OPTIONS
    router = Router(
        command=("trtllm-serve", "disaggregated"),
        disaggregates="",
        policies=_POLICIES,
        image="",
        remarks=("the router loads the driver's libcuda: run it on a node with GPUs",),
    )

    def write(
        self, served: ServedOptions, file: str, release: str = NEWEST
    ) -> tuple[list[str], dict[str, str]]:
        """Return the words of a server's command, and the file of settings that it reads."""
        named, options = RELEASES[release], self.options.write(served)
        settings = {path: it for path, it in options.items() if path.startswith(f"{FILE}.")}
        own = {name: it for name, it in options.items() if name not in settings}
        if served.drafts == "draft_model":
            settings[f"{DRAFTING}.decoding_type"] = named.draft_model
        tree = nest(
            {path: None if it == OFF else it for path, it in settings.items() if it is not None}
        )
        own[named.config] = f"{FILES_FOLDER}/{file}"
        # Its options have underscores, of which a command that is read has dashes.
        arguments = text_arguments({name.replace("-", "_"): it for name, it in own.items()})
        command = ["trtllm-serve", "serve", served.model_id, *arguments]
        return command, {file: yaml.safe_dump(tree.get(FILE, {}), sort_keys=False)}

    def serve(self, pool: LaunchPool) -> Launch:
        """Return what starts one replica of a pool."""
        profile = pool.scenario.resolve_engine()
        series, _ = find_release(profile)
        served = ServedOptions.of_pool(pool)
        _check_said(served, series)
        if profile.memory_rule != "free":
            # Another engine's share is of other things.
            served = replace(served, memory_utilization_ratio=0.0)
        command, files = self.write(served, f"{pool.pool.name}.llm.yaml", series)
        remarks = self.remarks(served, "MTP layers")
        if served.decode_context_parallel > 1 and not profile.repeats_queries:
            remarks.append(
                "TensorRT-LLM's ranks compute the queries that were simulated as gathered: set"
                " engine.rules.repeats_queries: true"
            )
        if served.role == "prefill" and profile.has_async_scheduling:
            remarks.append(
                f"servers of {pool.pool.name} schedule a step after the one before it, as those"
                " that compute prompts for others do: simulate them with"
                " engine.rules.has_async_scheduling: false"
            )
        if served.ep > 1:
            remarks.append(
                "TensorRT-LLM chooses by itself how tokens reach their experts:"
                f" {served.expert_exchange} was simulated"
            )
        return Launch(command=command, image=self.image(pool), files=files, remarks=remarks)

    def image(self, pool: LaunchPool) -> str:
        """Return the image of the newest release of the profile's series."""
        _, release = find_release(pool.scenario.resolve_engine())
        return f"nvcr.io/nvidia/tensorrt-llm/release:{release.tag}"

    def read(
        self, command: str, files: Mapping[str, str] | None = None
    ) -> tuple[Fields, list[str]] | None:
        """Return what a command starts: `trtllm-serve MODEL`, with its file of settings.

        Raises:
            InvalidRequestError: the file is not given, or has no settings.

        """
        split = split_words(command)
        starts = [at for at, text in enumerate(split) if PurePath(text).name == "trtllm-serve"]
        if not starts:
            return None
        words, options = group_words(split[starts[0] + 1 :])
        words = words[1:] if words[:1] == ["serve"] else words
        if len(words) != 1 or words[0] in _OTHERS:
            return None
        paths = [options.pop(name, None) for name in ("extra-llm-api-options", FILE)]
        for path in filter(None, paths):
            options |= _read_settings(str(path), files or {})
        return self.options.read({"model": words[0], **options})

    def route(self, urls_by_role: Mapping[str, Sequence[str]], router: str, image: str) -> Launch:
        """Return what starts TensorRT-LLM's orchestrator before pools, nginx before replicas.

        Raises:
            InvalidRequestError: it has no such policy.

        """
        addresses = {
            role: [url.removeprefix("http://") for url in urls]
            for role, urls in urls_by_role.items()
        }
        if "prefill" not in addresses:
            return self._balance(addresses["aggregated"], router)
        policy = self.find_policy(self.router.policies, router)
        config: dict[str, object] = {
            "hostname": SERVER_HOST,
            "port": SERVER_PORT,
            "backend": "pytorch",
        }
        for role, name in (("prefill", "context_servers"), ("decode", "generation_servers")):
            urls = addresses[role]
            config[name] = {"num_instances": len(urls), "urls": urls, "router": {"type": policy}}
        file = "router.servers.yaml"
        waits = ["-t", str(STARTUP_S), "-r", str(STARTUP_S)]
        return Launch(
            command=[*self.router.command, "-c", f"{FILES_FOLDER}/{file}", *waits],
            image=image,
            files={file: yaml.safe_dump(config, sort_keys=False)},
            remarks=[*self.router.remarks, *stand_in(policy, router)],
        )

    def _balance(self, addresses: Sequence[str], router: str) -> Launch:
        policy, file = self.find_policy(_BALANCED, router), "router.nginx.conf"
        said = {
            "directive": "" if policy == "round_robin" else policy,
            "addresses": addresses,
            "port": SERVER_PORT,
            "timeout_s": STARTUP_S,
        }
        return Launch(
            command=[
                "nginx",
                "-p",
                f"{FILES_FOLDER}/",
                "-c",
                file,
                "-e",
                "stderr",
                "-g",
                "daemon off;",
            ],
            image=_PROXY,
            files={file: render("nginx.conf", said)},
            remarks=[
                _PROXIED,
                *stand_in(policy, router),
            ],
        )


def _read_settings(path: str, files: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings of a file."""
    name = PurePath(path).name
    if name not in files:
        raise InvalidRequestError.of_field("files", f"the command reads {name}: give it, too")
    try:
        content = yaml.safe_load(files[name]) or {}
    except yaml.YAMLError as err:
        raise InvalidRequestError.of_field("files", f"{name} is no YAML: {err}") from err
    if not isinstance(content, dict):
        raise InvalidRequestError.of_field("files", f"{name} has no settings")
    leaves = flatten({FILE: content})
    # Where nothing is said of graphs there are some.
    return {
        path: OFF if it is None else it
        for path, it in leaves.items()
        if it is not None or path == GRAPHS
    }


ENGINE = TrtllmEngine()
