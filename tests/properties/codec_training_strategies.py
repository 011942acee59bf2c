"""Values and messages of training searches, runs and memory plans, for the codec's properties."""

from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

from foretoken.api.types.v1 import training_run_pb2, training_search_pb2
from foretoken.domain.hardware import price
from foretoken.domain.models.architecture import find_model
from foretoken.domain.requests import scenario, training_run, training_search
from foretoken.domain.results import training_report

SEARCH_CLASSES = (
    training_search.NodeGroup,
    training_search.RuledOut,
    training_search.SpaceCell,
    training_search.StrategyFinalist,
    training_search.StrategySensitivity,
    training_search.TieCall,
    training_search.TrainingSearchReport,
    training_search.TrainingSearchRequest,
    training_search.TrainingSpace,
)
RUN_CLASSES = (
    price.DevicePrice,
    price.PriceList,
    training_run.FailureRules,
    training_run.PriceRules,
    training_run.RunSize,
    training_run.SiteRules,
    training_run.TrainingMemoryReport,
    training_run.TrainingRunReport,
    training_run.TrainingRunRequest,
)
TRAINING_MIRRORS: Mapping[type, Any] = {
    **{cls: getattr(training_search_pb2, cls.__name__) for cls in SEARCH_CLASSES},
    **{cls: getattr(training_run_pb2, cls.__name__) for cls in RUN_CLASSES},
}

_POSITIVE = st.integers(1, 2**63 - 1)
_NOT_NEGATIVE = st.integers(0, 2**63 - 1)
_POSITIVE_FLOATS = st.floats(min_value=1e-9, allow_nan=False)
_POSITIVE_FINITE = st.floats(min_value=1e-9, allow_infinity=False)
_NOT_NEGATIVE_FLOATS = st.floats(min_value=0.0, allow_nan=False)
_SCENARIO = scenario.TrainingScenario(
    model=find_model("tiny-llama"), device="cpu", stage_devices=("cpu",), stage_topologies=("",)
)
_COUNTS = (
    *("num_devices", "global_batch_sizes", "tp", "pp", "virtual_stages", "cp", "ep"),
    *("micro_batch_sizes", "weight_degrees"),
)
_CHOICES = {
    "overlaps": training_search.OVERLAPS,
    "weight_parallel": training_search.WEIGHT_PARALLELS,
    "zero_stages": (0, 1, 2, 3),
}

TRAINING_RULES: Mapping[tuple[type, str], st.SearchStrategy[Any]] = {
    (training_search.NodeGroup, "num_nodes"): _POSITIVE,
    (training_search.NodeGroup, "devices_per_node"): _NOT_NEGATIVE,
    (training_search.NodeGroup, "usd_per_hour"): _NOT_NEGATIVE_FLOATS,
    **{
        (training_search.TrainingSpace, name): st.lists(_POSITIVE, max_size=3).map(tuple)
        for name in _COUNTS
    },
    **{
        (training_search.TrainingSpace, name): st.lists(st.sampled_from(known), max_size=3).map(
            tuple
        )
        for name, known in _CHOICES.items()
    },
    (training_search.TrainingSpace, "usd_per_hour"): st.dictionaries(
        st.text("ab", max_size=2), _NOT_NEGATIVE_FLOATS, max_size=2
    ),
    (training_search.TrainingSpace, "partition"): st.sampled_from(training_search.PARTITIONS),
    (training_search.TrainingSpace, "enumeration"): st.sampled_from(("grid", "internevo")),
    (training_search.TrainingSearchRequest, "scenario"): st.just(_SCENARIO),
    (training_search.TrainingSearchRequest, "objective"): st.sampled_from(
        training_search.TRAINING_OBJECTIVES
    ),
    (training_search.TrainingSearchRequest, "num_finalists"): _NOT_NEGATIVE,
    (training_search.TrainingSearchRequest, "max_candidates"): _POSITIVE,
    (training_search.StrategyFinalist, "report"): st.just(
        training_report.TrainingReport(step_time_ms=3.0)
    ),
    **{
        (training_run.FailureRules, name): _NOT_NEGATIVE_FLOATS
        for name in (
            *("device_mtbf_hours", "checkpoint_interval_s", "checkpoint_s"),
            *("checkpoint_stall_s", "restart_s"),
        )
    },
    (training_run.FailureRules, "checkpoint_bytes_per_s"): _POSITIVE_FLOATS,
    (training_run.SiteRules, "num_sites"): _POSITIVE,
    (training_run.SiteRules, "bytes_per_s"): _POSITIVE_FLOATS,
    (training_run.SiteRules, "latency_ms"): _NOT_NEGATIVE_FLOATS,
    (training_run.SiteRules, "sync_steps"): _POSITIVE,
    **{
        (training_run.PriceRules, name): _NOT_NEGATIVE_FLOATS
        for name in ("usd_per_hour", "device_w", "usd_per_kwh")
    },
    **{
        (price.DevicePrice, name): _NOT_NEGATIVE_FLOATS
        for name in ("usd_per_hour", "spot_usd_per_hour")
    },
    (price.PriceList, "prices"): st.just((price.DevicePrice(device="cpu", usd_per_hour=0.5),)),
    (training_run.PriceRules, "pue"): st.floats(min_value=1.0, allow_nan=False),
    (training_run.TrainingRunRequest, "scenario"): st.just(_SCENARIO),
    (training_run.TrainingRunRequest, "num_tokens"): _POSITIVE_FINITE,
    (training_run.TrainingRunRequest, "dataset"): st.just(""),
    (training_run.TrainingRunRequest, "num_epochs"): _POSITIVE_FINITE,
    (training_run.TrainingRunRequest, "target_days"): _NOT_NEGATIVE_FLOATS,
}
