"""How a server is started: the contract of `engines/`, and what its options say."""

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Protocol

from foretoken.domain.errors import ForetokenError, InvalidRequestError, UnknownPluginError
from foretoken.domain.frameworks.engine import EngineProfile, find_engine
from foretoken.domain.frameworks.engine_capability import EngineCapabilities
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.models.architecture import ModelArchitecture
from foretoken.domain.models.load import load_model
from foretoken.domain.models.stack import stack_of
from foretoken.domain.plugins import scan_modules
from foretoken.domain.requests.cluster import ReplicaPool, SpeculativeSpec
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.simulator.launch.options import Fields, OptionMap

# Where servers and routers listen.
SERVER_HOST, SERVER_PORT = "0.0.0.0", 8000  # noqa: S104 - a pod's own network
# Weights of large models take many minutes to load; a router waits so long for its servers.
STARTUP_S = 3600
# The environment variable whose value is the address of the pod.
POD_ADDRESS = "POD_ADDRESS"
# Stands in the words of a command for the folder with the files that it reads.
FILES_FOLDER = "{FILES_FOLDER}"
# What the master of a store of KV blocks is called, and where it listens.
STORE_NAME, STORE_PORT = "kv-store", 50051
# What installs Mooncake, whose store that is, in an image without it.
STORE_INSTALL = "pip install --quiet --user mooncake-transfer-engine"
# The words of options for number formats.
DTYPE_WORDS = {DType.BF16: "bfloat16", DType.FP16: "float16", DType.FP32: "float32"}
# Formats that servers make of a 16-bit checkpoint while they load it.
QUANTIZED_AT_LOAD = {"fp8": "fp8"}

# Rules of an engine's profile that options say.
_RULES = (
    "has_prefix_caching",
    "has_priority_scheduling",
    "mixes_prefill",
    "prefill_interval",
    "receive_interval",
    "expert_exchange",
    "has_expert_balancing",
    "num_redundant_experts",
    "two_batch_tokens",
    "decode_context_parallel",
    "window_tokens_ratio",
    "max_chunk_tokens",
    "batch_wait_iters",
    "batch_wait_tokens_ratio",
    "balance_timeout_iters",
    "balance_wait_iters",
)
_LAYOUT = ("tp", "pp", "dp", "ep", "attention_dp")
_LIMITS = ("max_num_seqs", "max_num_batched_tokens", "memory_utilization_ratio")


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchPool:
    """Replicas that are started alike: `scenario` is that of one of them, without a cluster.

    `model_id` is what the server loads: a name on Hugging Face, or a path. No request is longer
    than `max_tokens`, prompt and answer. Images are encoded at `encoder_urls` (empty: here).
    A store of KV blocks is that of so many devices, `num_sharing` (0: there is none).
    """

    pool: ReplicaPool
    scenario: ServingScenario
    model_id: str
    max_tokens: int
    encoder_urls: tuple[str, ...] = ()
    num_sharing: int = 0

    @property
    def num_devices(self) -> int:
        """Devices of a replica."""
        return self.scenario.layout.num_devices


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """A command, what it needs around it, and what its reader has to know.

    `variables` are environment variables; `{POD_ADDRESS}` in them stands for the pod's address.
    `files` are texts that it reads, by their names in the folder that `FILES_FOLDER` stands for.
    """

    command: Sequence[str]
    image: str
    variables: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    remarks: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedOptions:
    """What one replica is started with.

    Without speculation `drafts` is empty, of adapters without any `max_loras` is 0. `role` is that
    of the replica's pool. A format of weights is only named where the server makes it of a 16-bit
    checkpoint while it loads that. The model has `num_experts` in a layer (0: none, or the command
    alone is known). What is None is left to the engine. To a store of KV blocks that
    replicas share each device gives `store_bytes` of its host's memory; of a replica's own it has
    `host_bytes` there.
    """

    model_id: str
    dtype: DType
    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    attention_dp: bool = False
    max_tokens: int = 0
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    memory_utilization_ratio: float = 0.0
    quantization: str = ""
    kv_dtype: DType | None = None
    has_prefix_caching: bool = True
    has_graphs: bool = True
    has_priority_scheduling: bool = False
    mixes_prefill: bool = False
    prefill_interval: int = 1
    receive_interval: int = 1
    expert_exchange: str = "all_gather"
    has_expert_balancing: bool = False
    num_redundant_experts: int = 0
    two_batch_tokens: int = 0
    decode_context_parallel: int = 1
    window_tokens_ratio: float = 0.0
    fuses_all_reduce_norm: bool | None = None
    role: str = "aggregated"
    max_loras: int = 0
    num_loras: int = 0
    lora_rank: int = 0
    drafts: str = ""
    num_draft_tokens: int = 0
    draft_model: str = ""
    encoder_urls: tuple[str, ...] = ()
    store_bytes: int = 0
    host_bytes: int = 0
    num_experts: int = 0
    max_chunk_tokens: int = 0
    batch_wait_iters: int = 0
    batch_wait_tokens_ratio: float = 0.0
    balance_timeout_iters: int = 0
    balance_wait_iters: int = 0

    @classmethod
    def of_pool(cls, pool: LaunchPool) -> "ServedOptions":
        """Return what a replica of a pool is started with."""
        scenario, layout = pool.scenario, pool.scenario.layout
        engine, lora, drafts = scenario.resolve_engine(), scenario.lora, scenario.speculative
        tiers = scenario.engine.kv_tiers
        return cls(
            model_id=pool.model_id,
            dtype=scenario.dtype,
            tp=layout.tp,
            pp=layout.pp,
            dp=layout.dp,
            ep=layout.ep,
            attention_dp=layout.attention_dp,
            max_tokens=pool.max_tokens,
            **{name: getattr(engine, name) for name in (*_LIMITS, *_RULES)},
            quantization=_made_at_load(scenario),
            kv_dtype=scenario.kv_dtype,
            has_graphs=engine.graph_mode != "none",
            fuses_all_reduce_norm=(
                engine.fuses_all_reduce_norm
                if "fuses_all_reduce_norm" in scenario.engine.rules
                else None
            ),
            num_experts=_num_experts(scenario.model),
            role=pool.pool.role,
            encoder_urls=pool.encoder_urls,
            store_bytes=sum(
                tier.capacity_bytes // pool.num_sharing for tier in tiers if tier.is_shared
            ),
            host_bytes=sum(tier.capacity_bytes for tier in tiers if not tier.is_shared),
            max_loras=lora.max_loaded if lora else 0,
            num_loras=max(lora.num_adapters, lora.max_loaded) if lora else 0,
            lora_rank=lora.rank if lora else 0,
            drafts=_name_drafts(drafts),
            num_draft_tokens=drafts.num_draft_tokens if drafts else 0,
            draft_model=hub_name(drafts.draft_model) if drafts and drafts.draft_model else "",
        )

    @property
    def fields(self) -> dict[str, Any]:
        """The fields by name."""
        return asdict(self)


def _made_at_load(scenario: ServingScenario) -> str:
    """Return the scheme of weights, nothing where it is the checkpoint's."""
    is_own = scenario.quantization == scenario.model.quantization
    return "" if is_own else scenario.quantization


def hub_name(model: ModelArchitecture) -> str:
    """Return a model's name on Hugging Face, its own where none is known."""
    return next((alias for alias in model.aliases if "/" in alias), model.name)


def scenario_content(fields: Fields, profile: str) -> dict[str, Any]:
    """Return fields that were read as the content of a scenario file, by the rules of a profile."""
    rules = {name: fields[name] for name in _RULES if name in fields}
    if fields.get("fuses_all_reduce_norm") is not None:
        rules["fuses_all_reduce_norm"] = fields["fuses_all_reduce_norm"]
    if not fields.get("has_graphs", True):
        rules["graph_mode"] = "none"
    fields = {**fields, "attention_dp": fields.get("attention_dp") and _has_experts(fields)}
    content: dict[str, Any] = {
        "model": fields.get("model_id"),
        "dtype": fields.get("dtype"),
        "layout": {axis: fields[axis] for axis in _LAYOUT if axis in fields},
        "quantization": fields.get("quantization"),
        "kv_dtype": fields.get("kv_dtype"),
        "engine": {
            "profile": profile,
            **{name: fields[name] for name in _LIMITS if fields.get(name)},
            "rules": rules,
        },
    }
    if fields.get("max_loras"):
        num_loras = fields.get("num_loras") or fields["max_loras"]
        content["lora"] = {"num_adapters": num_loras, "max_loaded": fields["max_loras"]}
        if fields.get("lora_rank"):
            content["lora"]["rank"] = fields["lora_rank"]
    if drafts := fields.get("drafts"):
        if drafts == "eagle":  # A head that nobody has costs as a layer of the model.
            drafts = "draft_model" if _has_head(fields) else "layers"
        content["speculative"] = {
            "method": drafts,
            "num_draft_tokens": fields["num_draft_tokens"],
            "draft_model": fields["draft_model"] if drafts == "draft_model" else None,
        }
    return {name: value for name, value in content.items() if value}


NO_DRAFTS: Fields = {"drafts": "", "num_draft_tokens": 0, "draft_model": ""}


def drafting_fields(method: str, num_tokens: int, said: Mapping[str, Any], key: str) -> Fields:
    """Return the fields of drafting, whose model is `said` by a key, and must be of `draft_model`.

    A head of its own, such as EAGLE's, is a checkpoint and no model that drafts alone.
    """
    model = said[key] if method == "draft_model" else said.get(key) or ""
    drafts = "eagle" if method == "layers" and model else method
    return {"drafts": drafts, "num_draft_tokens": num_tokens, "draft_model": model}


def list_read_remarks(fields: Fields) -> tuple[str, ...]:
    """Return what a reader has to know of a command's scenario."""
    if fields.get("drafts") != "eagle" or _has_head(fields):
        return ()
    remark = (
        f"the head {fields['draft_model']} is no file or folder here, or none of EAGLE-3: its"
        " drafts cost as one layer of the model; give its config.json by --set"
        " speculative.method=draft_model --set speculative.draft_model=PATH"
    )
    return (remark,)


def _has_head(fields: Fields) -> bool:
    """Whether the head that a command drafts with is at hand: its `config.json`, or its folder."""
    try:
        return _is_head(load_model(str(fields["draft_model"])))
    except ForetokenError:
        return False


def _is_head(model: ModelArchitecture) -> bool:
    return any(part.kind == "draft_inputs" for part in model.extras)


def _has_experts(fields: Fields) -> bool:
    """Whether the model that a command names is known to have experts."""
    try:
        return count_experts(str(fields.get("model_id", ""))) > 0
    except LookupError:
        return False


def _name_drafts(drafts: SpeculativeSpec | None) -> str:
    """Return how engines draft, as they tell it: a model's head is none that drafts alone."""
    if drafts is None:
        return ""
    return "eagle" if drafts.draft_model and _is_head(drafts.draft_model) else drafts.method


def count_experts(model_id: str) -> int:
    """Return how many experts a layer has of the model that a command names.

    Raises:
        LookupError: the model is not known.

    """
    try:
        return _num_experts(load_model(model_id))
    except ForetokenError as err:
        raise LookupError(model_id) from err


def _num_experts(model: ModelArchitecture) -> int:
    return max((part.dims["num_experts"] for part in stack_of(model).experts), default=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Router:
    """The program before several replicas.

    `command` is its words before options, `disaggregates` the option that it has before prefill and
    decode pools, `prefill_words` what follows the address of a prefill replica. `policies` names
    its own by the routers of a cluster.
    """

    command: Sequence[str]
    disaggregates: str
    policies: Mapping[str, str]
    image: str
    prefill_words: Sequence[str] = ()
    remarks: Sequence[str] = ()


class ServingEngine(Protocol):
    """What a module of `engines/` offers as its `ENGINE`.

    `name` is that of profiles and of `foretoken collect --server`, `label` its own. `profile` is
    the engine profile of the newest release that files are written for. With `encodes_apart` they
    are for encoders of images apart, too. `made_at_load` are the formats that it makes of a 16-bit
    checkpoint.
    """

    name: ClassVar[str]
    label: ClassVar[str]
    profile: ClassVar[str]
    options: ClassVar[OptionMap]
    router: ClassVar[Router]
    encodes_apart: ClassVar[bool] = False
    made_at_load: ClassVar[Collection[str]] = tuple(QUANTIZED_AT_LOAD)

    @property
    def can(self) -> EngineCapabilities:
        """What the newest release that files are written for can do."""
        return find_engine(self.profile).can

    @abstractmethod
    def read(
        self, command: str, files: Mapping[str, str] | None = None
    ) -> tuple[Fields, list[str]] | None:
        """Return the fields of `ServedOptions` that a command says, and options that say none.

        None where the command starts something else. `files` are those that it may read.
        """

    @abstractmethod
    def serve(self, pool: LaunchPool) -> Launch:
        """Return what starts one replica of a pool."""

    @abstractmethod
    def image(self, pool: LaunchPool) -> str:
        """Return the container image of a pool's release."""

    def share(self, pool: LaunchPool) -> Launch:
        """Return what starts the master of the store that replicas share."""
        words = f'{STORE_INSTALL} && exec "$HOME/.local/bin/mooncake_master" --port {STORE_PORT}'
        return Launch(
            command=["sh", "-c", words],
            image=self.image(pool),
            remarks=("the package mooncake-transfer-engine is installed when pods start",),
        )

    def remarks(self, served: ServedOptions, drafts: str) -> list[str]:
        """Return what a reader has to know; `drafts` are where those of `layers` come from."""
        remarks = {
            f"weights are {served.quantization}: name a checkpoint that is, {self.label} takes its"
            " format from it": served.quantization not in ("", *self.made_at_load),
            f"drafts come from the model's own {drafts}; for EAGLE-3 give its head's config.json as"
            " speculative.draft_model": (served.drafts == "layers"),
            "KV caches move by NIXL, which must be in the image": served.role
            in ("prefill", "decode"),
            f"each GPU gives {served.store_bytes / 1e9:.0f} GB of its host's memory to the store,"
            " whose blocks move by RDMA: give pods that memory and the network's devices": (
                served.store_bytes > 0
            ),
            f"each GPU keeps {served.host_bytes / 1e9:.0f} GB of KV blocks on its host: give pods"
            " that memory": served.host_bytes > 0,
        }
        return [remark for remark, is_said in remarks.items() if is_said]

    def route(self, urls_by_role: Mapping[str, Sequence[str]], router: str, image: str) -> Launch:
        """Return what starts the router before servers at these addresses, by role of their pool.

        `image` is that of the servers, which a router without its own has, too.

        Raises:
            InvalidRequestError: the engine's router has no such policy.

        """
        program = self.router
        policy = self.find_policy(program.policies, router)
        words = [*program.command, "--host", SERVER_HOST, "--port", str(SERVER_PORT)]
        words += ["--policy", policy, "--worker-startup-timeout-secs", str(STARTUP_S)]
        if "prefill" in urls_by_role:
            words.append(f"--{program.disaggregates}")
            for url in urls_by_role["prefill"]:
                words += ["--prefill", url, *program.prefill_words]
            for url in urls_by_role["decode"]:
                words += ["--decode", url]
        else:
            words += ["--worker-urls", *urls_by_role["aggregated"]]
        remarks = [*program.remarks, *stand_in(policy, router)]
        return Launch(command=words, image=program.image or image, remarks=remarks)

    def find_policy(self, policies: Mapping[str, str], router: str) -> str:
        """Return what stands for a router of a cluster.

        Raises:
            InvalidRequestError: nothing does.

        """
        if router not in policies:
            raise InvalidRequestError.of_field(
                "cluster.routing.router",
                f"{self.label}'s router has nothing like {router}; it knows {', '.join(policies)}",
            )
        return policies[router]


def stand_in(policy: str, router: str) -> list[str]:
    """Return what a reader has to know of a policy that is not a cluster's router."""
    return [f"the router's policy {policy} stands for {router}"] if policy != router else []


def all_servers() -> Mapping[str, ServingEngine]:
    """Return every server that files are written for, by its name."""
    return scan_modules("foretoken.simulator.launch.engines", "ENGINE")


def find_server(name: str) -> ServingEngine:
    """Return how the server of this name is started.

    Raises:
        UnknownPluginError: no files are written for it.

    """
    server: ServingEngine = UnknownPluginError.look_up(name, all_servers())
    return server


def find_server_of(profile: EngineProfile) -> ServingEngine:
    """Return the server of a profile's engine.

    Raises:
        InvalidRequestError: no files are written for it.

    """
    if profile.engine not in all_servers():
        raise InvalidRequestError.of_field(
            "engine",
            f"files are written for {', '.join(sorted(all_servers()))}, not for"
            f" {profile.engine}: choose one",
        )
    return find_server(profile.engine)
