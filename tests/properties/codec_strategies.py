"""Hypothesis strategies for the dataclasses that travel, and the messages that mirror them."""

import dataclasses
import enum
import typing
from collections.abc import Mapping
from typing import Any

from codec_training_strategies import TRAINING_MIRRORS, TRAINING_RULES
from google.protobuf.message import Message
from hypothesis import strategies as st

from foretoken.api.catalog.v1 import catalog_service_pb2 as catalog_pb2
from foretoken.api.predictor.v1 import predictor_service_pb2 as predictor_pb2
from foretoken.api.profiler.v1 import profiler_service_pb2 as profiler_pb2
from foretoken.api.simulator.v1 import simulator_service_pb2 as simulator_pb2
from foretoken.api.types.v1 import (
    artifact_pb2,
    correction_pb2,
    echo_pb2,
    estimate_pb2,
    explanation_pb2,
    hardware_pb2,
    job_pb2,
    measurement_pb2,
    model_pb2,
    operator_pb2,
    parallelism_pb2,
    planning_pb2,
    profiling_pb2,
    report_pb2,
    scenario_pb2,
    search_pb2,
    workload_pb2,
)
from foretoken.domain import schema
from foretoken.domain.definition import Definition
from foretoken.domain.frameworks import engine
from foretoken.domain.frameworks.trainer import TrainerSpec
from foretoken.domain.hardware.device import DeviceSpec
from foretoken.domain.hardware.topology import Link, TopologySpec
from foretoken.domain.job import Job
from foretoken.domain.measurements import (
    correction,
    estimate,
    latency_models,
    measurement,
    planning,
    profiling,
    step_model,
    training_truth,
)
from foretoken.domain.measurements.measurement import Artifact
from foretoken.domain.metrics.request import LIMITED
from foretoken.domain.models.architecture import (
    MAX_LAYERS,
    MlaSpec,
    ModelArchitecture,
    MoeSpec,
    find_model,
)
from foretoken.domain.models.layer import LayerKind, LayerPart
from foretoken.domain.requests import cluster, scenario, search, workload
from foretoken.domain.requests.layout import MOST_DEVICES, ParallelLayout
from foretoken.domain.requests.slo import Slo, SloClass
from foretoken.domain.results import report, training_report
from foretoken.domain.results.echo import Echo
from foretoken.wire import codec

# Every dataclass that the codec translates. Queries and replies of the predictor travel as columns
# and have laws of their own.
MIRRORS: Mapping[type, type[Message]] = {
    Artifact: artifact_pb2.Artifact,
    Echo: echo_pb2.Echo,
    Definition: simulator_pb2.Definition,
    DeviceSpec: hardware_pb2.DeviceSpec,
    Job: job_pb2.Job,
    LayerKind: model_pb2.LayerKind,
    LayerPart: model_pb2.LayerPart,
    Link: hardware_pb2.Link,
    MlaSpec: model_pb2.MlaSpec,
    ModelArchitecture: model_pb2.ModelArchitecture,
    MoeSpec: model_pb2.MoeSpec,
    ParallelLayout: parallelism_pb2.ParallelLayout,
    Slo: scenario_pb2.Slo,
    SloClass: scenario_pb2.SloClass,
    TopologySpec: hardware_pb2.TopologySpec,
    correction.CorrectedObservation: correction_pb2.CorrectedObservation,
    correction.Correction: correction_pb2.Correction,
    correction.CorrectionRequest: predictor_pb2.CreateCorrectionRequest,
    correction.Observation: correction_pb2.Observation,
    correction.ObservedCall: correction_pb2.ObservedCall,
    step_model.StepKindModel: correction_pb2.StepKindModel,
    step_model.StepModel: correction_pb2.StepModel,
    estimate.LatencyEstimate: estimate_pb2.LatencyEstimate,
    estimate.OperatorCall: operator_pb2.OperatorCall,
    estimate.Contribution: explanation_pb2.Contribution,
    estimate.Explanation: explanation_pb2.Explanation,
    estimate.MeasuredNeighbour: explanation_pb2.MeasuredNeighbour,
    estimate.MemberAnswer: explanation_pb2.MemberAnswer,
    measurement.BatchReceipt: measurement_pb2.BatchReceipt,
    measurement.CheckRequest: catalog_pb2.CreateCheckRequest,
    measurement.CompactReport: catalog_pb2.CompactReport,
    measurement.Coverage: measurement_pb2.Coverage,
    measurement.MeasuredSubject: measurement_pb2.MeasuredSubject,
    measurement.MeasurementFilter: measurement_pb2.MeasurementFilter,
    measurement.PruneReport: catalog_pb2.PruneReport,
    measurement.PruneRequest: catalog_pb2.PruneRequest,
    measurement.QualityFinding: measurement_pb2.QualityFinding,
    measurement.QualityReport: measurement_pb2.QualityReport,
    measurement.Run: measurement_pb2.Run,
    measurement.RunSummary: measurement_pb2.RunSummary,
    measurement.Snapshot: measurement_pb2.Snapshot,
    measurement.SnapshotChange: measurement_pb2.SnapshotChange,
    measurement.SnapshotDiff: measurement_pb2.SnapshotDiff,
    measurement.SqlQuery: catalog_pb2.QuerySqlRequest,
    planning.CandidateAxis: planning_pb2.CandidateAxis,
    planning.PlannedPoint: planning_pb2.PlannedPoint,
    planning.PlanRequest: predictor_pb2.PlanProfileRequest,
    planning.ProfilePlan: planning_pb2.ProfilePlan,
    latency_models.ModelVersion: predictor_pb2.ModelVersion,
    profiling.ClosureReport: profiling_pb2.ClosureReport,
    profiling.ClosureRequest: profiler_pb2.CreateClosureRequest,
    profiling.ClosureStep: profiling_pb2.ClosureStep,
    profiling.GraphReport: profiling_pb2.GraphReport,
    profiling.GraphRequest: profiler_pb2.CreateGraphProfileRequest,
    profiling.MeasuredStep: profiling_pb2.MeasuredStep,
    profiling.OperatorOutline: profiling_pb2.OperatorOutline,
    profiling.OperatorProfile: report_pb2.OperatorProfile,
    profiling.ProfileOutline: profiling_pb2.ProfileOutline,
    profiling.ProfileReport: report_pb2.ProfileReport,
    profiling.ProfileRequest: profiling_pb2.ProfileRequest,
    latency_models.TrainRequest: predictor_pb2.CreateTrainingRequest,
    report.ClassReport: report_pb2.ClassReport,
    report.EngineReport: report_pb2.EngineReport,
    report.Feasibility: report_pb2.Feasibility,
    report.HeldOutCase: report_pb2.HeldOutCase,
    report.Histogram: report_pb2.Histogram,
    report.OperatorTrainingReport: report_pb2.OperatorTrainingReport,
    report.Percentiles: report_pb2.Percentiles,
    report.PoolReport: report_pb2.PoolReport,
    report.ReplicaPhase: report_pb2.ReplicaPhase,
    report.PredictorTrainingReport: report_pb2.PredictorTrainingReport,
    report.ServingReport: report_pb2.ServingReport,
    report.ServingStageMemory: report_pb2.ServingStageMemory,
    report.SplitScore: report_pb2.SplitScore,
    report.StageReport: report_pb2.StageReport,
    report.SteadyWindow: report_pb2.SteadyWindow,
    engine.EngineSpec: scenario_pb2.EngineSpec,
    engine.KvTier: scenario_pb2.KvTier,
    scenario.ServingScenario: scenario_pb2.ServingScenario,
    scenario.TrainingScenario: scenario_pb2.TrainingScenario,
    **{
        cls: getattr(scenario_pb2, cls.__name__)
        for cls in (
            cluster.AutoscalingSpec,
            cluster.ClusterSpec,
            cluster.FailureSpec,
            cluster.KvTransferSpec,
            cluster.LoraSpec,
            cluster.ReplicaOutage,
            cluster.ReplicaPool,
            cluster.RoutingSpec,
            cluster.SpeculativeSpec,
        )
    },
    **{
        cls: getattr(search_pb2, cls.__name__)
        for cls in (
            search.CapacityProbe,
            search.CapacityReport,
            search.CapacityRequest,
            search.Finalist,
            search.LatencyLimit,
            search.LimitOutcome,
            search.Sensitivity,
            search.ServingSearchReport,
            search.ServingSearchRequest,
            search.ServingSpace,
            search.ServingTargets,
        )
    },
    **TRAINING_MIRRORS,
    TrainerSpec: scenario_pb2.TrainerSpec,
    training_report.ComponentTime: report_pb2.ComponentTime,
    training_report.StageMemory: report_pb2.StageMemory,
    training_report.TrainingReport: report_pb2.TrainingReport,
    training_truth.ModuleTime: scenario_pb2.ModuleTime,
    training_truth.ModuleTimes: scenario_pb2.ModuleTimes,
    training_truth.TrainingCalibration: scenario_pb2.TrainingCalibration,
    workload.LengthSpec: workload_pb2.LengthSpec,
    workload.SessionSpec: workload_pb2.SessionSpec,
    workload.ImageSpec: workload_pb2.ImageSpec,
    workload.SoundSpec: workload_pb2.SoundSpec,
    workload.Request: workload_pb2.WorkloadRequest,
    workload.WorkloadSpec: workload_pb2.WorkloadSpec,
}

INT64 = st.integers(-(2**63), 2**63 - 1)
POSITIVE = st.integers(1, 2**63 - 1)
NOT_NEGATIVE = st.integers(0, 2**63 - 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
FLOATS = st.floats(allow_nan=False)

POSITIVE_FLOATS = st.floats(min_value=1e-9, allow_nan=False)
NOT_NEGATIVE_FLOATS = st.floats(min_value=0.0, allow_nan=False)
FINITE_TIMES = st.floats(min_value=0.0, allow_infinity=False)
POSITIVE_FINITE = st.floats(min_value=1e-9, allow_infinity=False)


_ENGINE_LIMITS = ("max_num_seqs", "max_num_batched_tokens", "num_kv_blocks")
_TRACE_COUNTS = ("hash_block_tokens", "max_num_requests")

_CLUSTER_RULES: Mapping[tuple[type, str], st.SearchStrategy[Any]] = {
    (cluster.AutoscalingSpec, "policy"): TEXT.filter(bool),
    (cluster.AutoscalingSpec, "min_replicas"): st.integers(1, 5),
    (cluster.AutoscalingSpec, "max_replicas"): st.integers(5, 2**63 - 1),
    (cluster.AutoscalingSpec, "interval_s"): POSITIVE_FLOATS,
    (cluster.AutoscalingSpec, "cold_start_s"): NOT_NEGATIVE_FLOATS,
    (cluster.ReplicaPool, "name"): TEXT.filter(bool),
    (cluster.ReplicaPool, "role"): st.sampled_from(cluster.POOL_ROLES),
    (cluster.ReplicaPool, "num_replicas"): st.integers(1, MOST_DEVICES),
    (cluster.ReplicaPool, "device_usd_per_hour"): NOT_NEGATIVE_FLOATS,
    (cluster.ReplicaPool, "device_idle_w"): st.just(0.0),
    (cluster.ReplicaPool, "device_busy_w"): NOT_NEGATIVE_FLOATS,
    (cluster.RoutingSpec, "load_interval_ms"): NOT_NEGATIVE_FLOATS,
    (cluster.RoutingSpec, "max_outstanding"): NOT_NEGATIVE,
    (cluster.RoutingSpec, "max_queued"): NOT_NEGATIVE,
    (cluster.KvTransferSpec, "bandwidth_bytes_per_s"): NOT_NEGATIVE_FLOATS,
    (cluster.KvTransferSpec, "latency_us"): NOT_NEGATIVE_FLOATS,
    (cluster.ReplicaOutage, "replica"): NOT_NEGATIVE,
    (cluster.ReplicaOutage, "start_s"): NOT_NEGATIVE_FLOATS,
    (cluster.ReplicaOutage, "restart_s"): POSITIVE_FLOATS,
    (cluster.FailureSpec, "mtbf_s"): NOT_NEGATIVE_FLOATS,
    (cluster.FailureSpec, "restart_s"): POSITIVE_FLOATS,
    (cluster.FailureSpec, "max_retries"): NOT_NEGATIVE,
    (cluster.FailureSpec, "retry_delay_s"): NOT_NEGATIVE_FLOATS,
    (cluster.ClusterSpec, "decode_routing"): st.deferred(
        lambda: values_of(cluster.RoutingSpec).map(
            lambda routing: dataclasses.replace(routing, max_queued=0)
        )
    ),
    (cluster.ClusterSpec, "pools"): st.deferred(
        lambda: st.lists(
            values_of(cluster.ReplicaPool).map(
                lambda pool: dataclasses.replace(pool, role="aggregated")
            ),
            min_size=1,
            max_size=2,
            unique_by=lambda pool: pool.name,
        ).map(tuple)
    ),
    # Outages name a pool of the cluster.
    (cluster.FailureSpec, "outages"): st.just(()),
    (cluster.SpeculativeSpec, "method"): st.just("draft_model"),
    (cluster.SpeculativeSpec, "num_draft_tokens"): st.just(2),
    (cluster.SpeculativeSpec, "acceptance_by_position"): st.sampled_from([(), (0.8, 0.3)]),
    (cluster.SpeculativeSpec, "acceptance_ratio"): st.floats(0.0, 1.0),
    (cluster.SpeculativeSpec, "draft_model"): st.deferred(lambda: values_of(ModelArchitecture)),
    (cluster.SpeculativeSpec, "num_draft_layers"): POSITIVE,
    **{(cluster.LoraSpec, name): POSITIVE for name in ("rank", "max_loaded")},
    (cluster.LoraSpec, "num_adapters"): st.integers(1, 2**20),
    (cluster.LoraSpec, "popularity_spread"): NOT_NEGATIVE_FLOATS,
    (cluster.LoraSpec, "load_bytes_per_s"): POSITIVE_FLOATS,
    (cluster.LoraSpec, "targets"): st.sampled_from(["all", "attention"]),
}

_SPACE_COUNTS = ("tp", "pp", "dp", "ep", "max_num_seqs", "max_num_batched_tokens")
_CLUSTER = cluster.ClusterSpec(pools=(cluster.ReplicaPool(name="pool"),))
_SCENARIO = scenario.ServingScenario(model=find_model("tiny-llama"), device="cpu", cluster=_CLUSTER)

_SEARCH_RULES: Mapping[tuple[type, str], st.SearchStrategy[Any]] = {
    (search.CapacityRequest, "scenario"): st.just(_SCENARIO),
    (search.CapacityReport, "at_capacity"): st.just(report.ServingReport(num_requests=3)),
    (search.Finalist, "report"): st.just(report.ServingReport(num_requests=3)),
    (search.ServingSearchRequest, "scenario"): st.just(_SCENARIO),
    (search.LatencyLimit, "metric"): st.sampled_from(sorted(LIMITED)),
    (search.LatencyLimit, "percentile"): st.floats(0.0, 100.0),
    (search.LatencyLimit, "limit_ms"): POSITIVE_FLOATS,
    (search.ServingTargets, "slo_attainment_ratio"): st.floats(0.0, 1.0),
    (search.CapacityRequest, "targets"): st.deferred(
        lambda: values_of(search.LatencyLimit).map(
            lambda limit: search.ServingTargets(limits=(limit,))
        )
    ),
    (search.CapacityRequest, "tolerance_ratio"): st.floats(0.001, 0.5),
    (search.CapacityRequest, "confidence_ratio"): st.floats(0.5, 0.99),
    (search.CapacityRequest, "max_rps"): NOT_NEGATIVE_FLOATS,
    **{
        (search.ServingSpace, name): st.lists(POSITIVE, max_size=3).map(tuple)
        for name in _SPACE_COUNTS
    },
    (search.ServingSpace, "max_devices"): POSITIVE,
    (search.ServingSpace, "encoders"): st.lists(st.integers(0, 8), max_size=3).map(tuple),
    (search.ServingSpace, "modes"): st.sampled_from([(), search.SERVING_MODES]),
    (search.ServingSearchRequest, "objective"): st.sampled_from(search.OBJECTIVES),
    (search.ServingSearchRequest, "counted_gpus"): st.sampled_from(search.COUNTED_GPUS),
    (search.ServingSearchRequest, "target_rps"): NOT_NEGATIVE_FLOATS,
    (search.ServingSearchRequest, "num_finalists"): NOT_NEGATIVE,
    (search.ServingSearchRequest, "num_curves"): NOT_NEGATIVE,
}

# What a dataclass refuses on its own.
_RULES: Mapping[tuple[type, str], st.SearchStrategy[Any]] = {
    (ModelArchitecture, "num_layers"): st.integers(1, MAX_LAYERS),
    (ModelArchitecture, "hidden"): POSITIVE,
    (ModelArchitecture, "num_heads"): st.sampled_from([8, 64]),
    (ModelArchitecture, "num_kv_heads"): st.sampled_from([1, 2, 8]),
    # That of the values where attention is latent.
    (ModelArchitecture, "head_dim"): st.just(128),
    (MlaSpec, "v_head_dim"): st.just(128),
    **{
        (MlaSpec, name): POSITIVE
        for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim")
    },
    (MlaSpec, "q_lora_rank"): NOT_NEGATIVE,
    (MoeSpec, "num_experts"): st.integers(8, 2**63 - 1),
    (MoeSpec, "top_k"): st.integers(1, 8),
    (MoeSpec, "expert_intermediate"): POSITIVE,
    (MoeSpec, "num_shared_experts"): NOT_NEGATIVE,
    (MoeSpec, "num_dense_layers"): st.integers(0, 1),
    (MoeSpec, "num_groups"): st.integers(8, 2**63 - 1),
    (MoeSpec, "top_k_groups"): st.integers(0, 8),
    (ModelArchitecture, "intermediate"): POSITIVE,
    (ModelArchitecture, "max_position"): POSITIVE,
    (ModelArchitecture, "sliding_window"): NOT_NEGATIVE,
    (ModelArchitecture, "full_attention_period"): NOT_NEGATIVE,
    (ModelArchitecture, "vocab"): POSITIVE,
    # Layers by name, their pattern and what is outside them hang together.
    (LayerKind, "name"): st.from_regex(r"\A[A-Za-z_][A-Za-z0-9_-]{0,7}\Z"),
    (LayerKind, "mixer"): st.deferred(lambda: values_of(LayerPart)),
    (LayerPart, "kind"): st.just("prediction_heads"),
    (LayerPart, "dims"): st.fixed_dictionaries({"num_modules": POSITIVE}),
    (ModelArchitecture, "layers"): st.just(()),
    (ModelArchitecture, "pattern"): st.just(""),
    (ModelArchitecture, "quantization"): st.sampled_from(["", "fp8_block", "experts=nvfp4"]),
    (ModelArchitecture, "activation"): st.sampled_from(["silu", "gelu", "relu2"]),
    (ModelArchitecture, "norm"): st.sampled_from(["rms_norm", "layer_norm"]),
    (ModelArchitecture, "position"): st.sampled_from(["rope", "learned"]),
    **{(ParallelLayout, axis): st.integers(1, 16) for axis in ("tp", "pp", "dp", "cp")},
    (ParallelLayout, "ep"): st.integers(1, MOST_DEVICES),
    **{
        (scenario.TrainingScenario, name): st.integers(-(2**63), 2**16)
        for name in ("sequence_length", "micro_batch_size", "global_batch_size", "virtual_stages")
    },
    **{(Slo, limit): st.floats(min_value=0.0, allow_nan=False) for limit in LIMITED},
    (Slo, "itl_percentile"): st.floats(0.0, 100.0),
    (correction.CorrectionRequest, "name"): TEXT.filter(bool),
    (correction.CorrectionRequest, "observations"): st.deferred(
        lambda: _some(correction.Observation)
    ),
    # Only without observations.
    (correction.CorrectionRequest, "steps"): st.none(),
    (correction.Observation, "observed_us"): POSITIVE_FINITE,
    (step_model.StepKindModel, "kind"): st.sampled_from(step_model.STEP_KINDS),
    (step_model.StepKindModel, "num_steps"): st.integers(1, 2**63 - 1),
    (step_model.StepKindModel, "ratio"): POSITIVE_FINITE,
    (step_model.StepKindModel, "constant_us"): st.floats(min_value=0.0, allow_infinity=False),
    (step_model.StepKindModel, "low_ratio"): st.floats(0.01, 1.0),
    (step_model.StepKindModel, "high_ratio"): st.floats(1.0, 100.0),
    (correction.ObservedCall, "count"): st.floats(min_value=0.0, allow_infinity=False),
    (correction.Observation, "calls"): st.deferred(lambda: _some(correction.ObservedCall)),
    (planning.CandidateAxis, "values"): st.sets(INT64, min_size=1, max_size=3).map(
        lambda values: tuple(sorted(values))
    ),
    (planning.PlanRequest, "axes"): st.deferred(
        lambda: st.lists(
            values_of(planning.CandidateAxis), max_size=3, unique_by=lambda axis: axis.dim
        ).map(tuple)
    ),
    (planning.PlanRequest, "budget_gpu_s"): POSITIVE_FLOATS,
    (planning.PlanRequest, "seed"): NOT_NEGATIVE,
    (latency_models.TrainRequest, "seed"): NOT_NEGATIVE,
    (profiling.ClosureStep, "kind"): st.sampled_from(profiling.STEP_KINDS),
    (profiling.ClosureStep, "mode"): st.sampled_from(profiling.STEP_MODES),
    (profiling.ClosureStep, "batch_size"): POSITIVE,
    (profiling.ClosureStep, "num_tokens"): POSITIVE,
    (profiling.ProfileRequest, "kernels"): st.sampled_from(profiling.KERNEL_CHOICES),
    (profiling.ProfileRequest, "cache"): st.sampled_from(profiling.CACHE_STATES),
    (profiling.ProfileRequest, "tp_sizes"): st.lists(POSITIVE, max_size=3).map(tuple),
    (profiling.ProfileRequest, "num_ranks"): NOT_NEGATIVE,
    (profiling.ProfileRequest, "seed"): NOT_NEGATIVE,
    (profiling.ProfileRequest, "time_cap_s"): NOT_NEGATIVE_FLOATS,
    (planning.PlanRequest, "max_num_points"): NOT_NEGATIVE,
    (profiling.GraphRequest, "sequence_length"): st.integers(1, 2**20),
    (profiling.GraphRequest, "tp_sizes"): st.lists(POSITIVE, max_size=3).map(tuple),
    (profiling.ClosureRequest, "num_layers"): NOT_NEGATIVE,
    (profiling.ClosureRequest, "time_cap_s"): NOT_NEGATIVE_FLOATS,
    (scenario.ServingScenario, "seed"): NOT_NEGATIVE,
    (scenario.ServingScenario, "moe_imbalance_ratio"): st.floats(min_value=1.0),
    # What nests deeply is drawn on its own; here it is there or not.
    (scenario.ServingScenario, "cluster"): st.none() | st.just(_CLUSTER),
    (scenario.ServingScenario, "speculative"): st.none() | st.just(cluster.SpeculativeSpec()),
    (scenario.ServingScenario, "lora"): st.none() | st.just(cluster.LoraSpec(num_adapters=2)),
    (scenario.ServingScenario, "slo_classes"): st.deferred(
        lambda: st.lists(values_of(SloClass), max_size=1).map(tuple)
    ),
    (scenario.ServingScenario, "device_usd_per_hour"): NOT_NEGATIVE_FLOATS,
    (scenario.ServingScenario, "power_limit_w"): NOT_NEGATIVE_FLOATS,
    (scenario.ServingScenario, "device_idle_w"): st.just(0.0),
    (scenario.ServingScenario, "device_busy_w"): NOT_NEGATIVE_FLOATS,
    **_CLUSTER_RULES,
    **_SEARCH_RULES,
    **TRAINING_RULES,
    (SloClass, "share_ratio"): st.floats(0.0, 1.0),
    **{(engine.EngineSpec, name): st.integers(0, 2**20) for name in _ENGINE_LIMITS},
    (engine.EngineSpec, "memory_utilization_ratio"): st.floats(0.0, 1.0),
    (engine.KvTier, "capacity_bytes"): POSITIVE,
    (engine.KvTier, "read_bytes_per_s"): POSITIVE_FLOATS,
    (engine.KvTier, "write_bytes_per_s"): POSITIVE_FLOATS,
    **{(training_truth.ModuleTime, name): FINITE_TIMES for name in ("forward_us", "backward_us")},
    (training_truth.ModuleTime, "micro_batch_size"): POSITIVE,
    (training_truth.ModuleTime, "communication_us"): st.just(0.0),
    (training_truth.ModuleTimes, "tp"): POSITIVE,
    (training_truth.ModuleTimes, "measures"): st.sampled_from(training_truth.MEASURES),
    **{
        (training_truth.TrainingCalibration, name): NOT_NEGATIVE_FLOATS
        for name in ("forward_gap_us", "backward_gap_us", "step_gap_us")
    },
    (training_truth.TrainingCalibration, "step_factor"): POSITIVE_FINITE,
    **{(workload.LengthSpec, name): NOT_NEGATIVE for name in ("mean", "minimum", "maximum")},
    (workload.LengthSpec, "spread"): NOT_NEGATIVE_FLOATS,
    (workload.LengthSpec, "values"): st.lists(POSITIVE, max_size=3).map(tuple),
    **{
        (workload.ImageSpec, name): POSITIVE
        for name in ("num_images", "height", "width", "num_frames")
    },
    (workload.SoundSpec, "num_clips"): POSITIVE,
    (workload.SoundSpec, "seconds"): st.floats(1e-3, 1e6),
    (workload.SessionSpec, "think_s"): NOT_NEGATIVE_FLOATS,
    (workload.SessionSpec, "shared_prefix_tokens"): st.integers(0, 2**31 - 1),
    (workload.SessionSpec, "num_shared_prefixes"): POSITIVE,
    **{(workload.WorkloadSpec, name): NOT_NEGATIVE for name in _TRACE_COUNTS},
    (workload.WorkloadSpec, "window_start_s"): st.floats(0.0, 1e6),
    (workload.WorkloadSpec, "window_end_s"): st.just(0.0) | st.floats(1e7, 1e9),
    (workload.WorkloadSpec, "rate_rps"): POSITIVE_FLOATS,
    (workload.WorkloadSpec, "num_requests"): st.integers(1, 2**31 - 1),
    (workload.WorkloadSpec, "time_scale"): POSITIVE_FLOATS,
    (workload.WorkloadSpec, "max_tokens_per_request"): NOT_NEGATIVE,
}


def values_of(cls: type) -> st.SearchStrategy[Any]:
    """Any legal value of a dataclass."""
    arguments = {
        name: _RULES[cls, name] if (cls, name) in _RULES else _values_of_hint(hint)
        for name, hint in schema.field_types(cls).items()
        if (cls, name) not in codec.ARROW_FIELDS
    }
    return st.builds(cls, **arguments)


def _some(cls: type) -> st.SearchStrategy[Any]:
    return st.lists(values_of(cls), min_size=1, max_size=3).map(tuple)


def _values_of_hint(hint: Any) -> st.SearchStrategy[Any]:
    inner = schema.optional_type(hint)
    if inner is not None:
        return st.none() | _values_of_hint(inner)
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is tuple:
        return st.lists(_values_of_hint(arguments[0]), max_size=3).map(tuple)
    if typing.get_origin(hint) is Mapping:
        keys, items = map(_values_of_hint, arguments)
        return st.dictionaries(keys, items, max_size=3)
    if dataclasses.is_dataclass(hint):
        return values_of(typing.cast("type", hint))
    if issubclass(hint, enum.Enum):
        return st.sampled_from(hint)
    return {int: INT64, float: FLOATS, str: TEXT, bool: st.booleans()}[hint]
