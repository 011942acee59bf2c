"""A small request of every rpc that would be answered, to put a hostile name into."""

import hashlib
import io
import zipfile
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
from google.protobuf import json_format
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from foretoken.api.types.v1 import scenario_pb2
from foretoken.domain.models.architecture import ModelArchitecture
from foretoken.domain.requests.scenario import ServingScenario, TrainingScenario
from foretoken.domain.requests.workload import Request, WorkloadSpec
from foretoken.wire import codec
from foretoken.wire.arrow import rows_to_table

_TINY = ModelArchitecture(
    name="tiny",
    num_layers=2,
    hidden=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate=128,
    vocab=256,
    max_position=512,
)
_SERVING = ServingScenario(
    model=_TINY,
    device="a30",
    workload=WorkloadSpec(
        arrival="trace",
        num_requests=1,
        trace_requests=(Request(arrival_s=0.1, num_prefill_tokens=16, num_decode_tokens=4),),
    ),
)
_TRAINING = TrainingScenario(model=_TINY, device="a30", sequence_length=128)
_CONFIG = (
    '{"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 4,'
    ' "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 256,'
    ' "max_position_embeddings": 128}'
)
_ROW = {
    "operator": "silu_mul",
    "phase": "forward",
    "dtype": "fp32",
    "dims": {"num_tokens": 1, "intermediate": 2},
    "device": "cpu",
    "latency_us_median": 3.0,
    "status": "ok",
    "flags": [],
}
_CALL = {
    "operator": "silu_mul",
    "dtype": "DTYPE_FP32",
    "dims": {"num_tokens": "1", "intermediate": "2"},
}
_TABLE = {
    "operator": "silu_mul",
    "dtype": "DTYPE_FP32",
    "columns": {
        "columns": [
            {"name": "num_tokens", "values": ["1"]},
            {"name": "intermediate", "values": ["2"]},
        ]
    },
}
_PREDICT = {"device": "cpu", "tables": [_TABLE]}
_PROFILE = {
    "profile": {
        "device": "cpu", "operators": ["silu_mul"], "quick": True, "time_cap_s": 0.01,
        "name": "usual",
    }
}  # fmt: skip
_OF_CONFIG = {"device": "cpu", "model": "tiny", "config_json": _CONFIG, "time_cap_s": 0.01}
_SERVING_MESSAGE = json_format.MessageToDict(
    codec.encode(_SERVING, scenario_pb2.ServingScenario), preserving_proto_field_name=True
)
_TRAINING_MESSAGE = json_format.MessageToDict(
    codec.encode(_TRAINING, scenario_pb2.TrainingScenario), preserving_proto_field_name=True
)


def _pack() -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("manifest.json", "{}")
        archive.writestr("climbed.txt", "x")
    return content.getvalue()


ARCHIVE = _pack()
# The facts are those of a version, which the archive is not.
_ARTIFACT = {
    "kind": "latency_models",
    "name": "sound",
    "content_hash": hashlib.sha256(ARCHIVE).hexdigest(),
    "byte_count": len(ARCHIVE),
    "created_at": "2026-01-02T03:04:05Z",
    "metadata_json": '{"snapshot_hash": "none", "num_rows": 1}',
}
# By the name of the rpc. All others name something that was made before.
_CONTENTS: Mapping[str, Mapping[str, Any]] = {
    "Record": {"run": {"run_id": "usual", "kind": "RUN_KIND_IMPORT"}},
    "StoreArtifact": {"artifact": _ARTIFACT},
    "QuerySql": {"text": "SELECT 1"},
    "ListArtifacts": {"kind": "latency_models"},
    "ReadArtifact": {"kind": "latency_models", "name": "sound"},
    "ActivateArtifact": {"kind": "latency_models", "name": "sound"},
    "Predict": _PREDICT,
    "Explain": {"query": _PREDICT},
    "Tabulate": {
        "device": "cpu",
        "operator": "silu_mul",
        "dtype": "DTYPE_FP32",
        "axes": [
            {"dim": "num_tokens", "values": ["1"]},
            {"dim": "intermediate", "values": ["2"]},
        ],
    },
    "PlanProfile": {"device": "cpu", "operator": "silu_mul", "dtype": "DTYPE_FP32"},
    "CreateCorrection": {
        "name": "usual",
        "device": "cpu",
        "observations": [
            {"name": "one", "calls": [{"call": _CALL, "count": 1}], "observed_us": 5.0}
        ],
    },
    "OutlineProfile": _PROFILE,
    "CreateProfile": _PROFILE,
    "CreateGraphProfile": _OF_CONFIG,
    "CreateClosure": {**_OF_CONFIG, "quick": True},
    "CreateServingSimulation": {"scenario": _SERVING_MESSAGE},
    "CreateTrainingSimulation": {"scenario": _TRAINING_MESSAGE},
    "PlanTrainingMemory": {"scenario": _TRAINING_MESSAGE},
    "PlanTrainingRun": {"request": {"scenario": _TRAINING_MESSAGE, "token_count": 1e6}},
    "CreateCapacitySearch": {
        "request": {
            "scenario": {**_SERVING_MESSAGE, "workload": {}},
            "targets": {"limits": [{"metric": "ttft_ms", "percentile": 50, "limit_ms": 1e6}]},
            "max_rps": 1.0,
        }
    },
    "CreateServingSearch": {"request": {"scenario": {**_SERVING_MESSAGE, "workload": {}}}},
    "CreateTrainingSearch": {"request": {"scenario": _TRAINING_MESSAGE}},
}


# What is added to a message to get at a string in it.
PARTS: Mapping[str, Mapping[str, Any]] = {
    "ModelArchitecture": _SERVING_MESSAGE["model"],
    "OperatorCall": _CALL,
    "ReplicaPool": {"name": "pool"},
    "SloClass": {"name": "chat"},
    "WorkloadRequest": {"arrival_s": 0.5, "prefill_token_count": "8", "decode_token_count": "8"},
}


def has_sound_request(method: MethodDescriptor) -> bool:
    """Whether the request of a method is one that is answered."""
    return method.name in _CONTENTS


def sound_request(method: MethodDescriptor) -> Message:
    """Return a request of a method, or the first message of a stream of them."""
    message: Message = GetMessageClass(method.input_type)()
    return json_format.ParseDict(dict(_CONTENTS.get(method.name, {})), message)


def rest_of_stream(method: MethodDescriptor) -> list[Message]:
    """Return what follows the first message of a stream of requests."""
    message: Any = GetMessageClass(method.input_type)()
    if method.name == "StoreArtifact":
        message.chunk = ARCHIVE
        return [message]
    table = rows_to_table([_ROW])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    message.chunk.arrow_ipc = sink.getvalue().to_pybytes()
    message.chunk.end_of_batch = True
    message.chunk.receipt_wanted = True
    return [message]
