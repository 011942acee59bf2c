"""The table of rpcs: a line each, which makes clients, servicers, retries, budgets and rights."""

import math
from typing import Any

from foretoken.domain.ports import (
    CatalogAdminPort,
    JobsPort,
    PredictorPort,
    ProfilerPort,
    SimulatorPort,
)
from foretoken.wire import columns
from foretoken.wire.rights import Right
from foretoken.wire.rpc import (
    ByHand,
    Form,
    Pages,
    Parts,
    Report,
    RpcTable,
    States,
    Stream,
    Table,
    Unary,
    Watch,
)

_QUERY = Form(columns.encode_query, columns.decode_query)
_REPLY = Form(columns.encode_reply, lambda reply, _query: columns.decode_reply(reply))
_SURFACE = Form(lambda surface, _: columns.encode_surface(surface), columns.decode_surface)
_QUERY_PARTS = Parts(
    columns.split_query, columns.join_replies, version=lambda reply: reply.model_version
)
# Of a query, about: three dimensions, each a number of 8 bytes.
_ROW_BYTES = 24


class JobRpcs(RpcTable):
    """Every service has these."""

    get_job = Unary(JobsPort.get_job, Right.READ, is_idempotent=True)
    list_jobs = Pages(JobsPort.list_jobs, Right.READ, key="job_id", is_idempotent=True)
    watch_job = States(JobsPort.watch_job, Right.READ, budget=256)
    cancel_job = Unary(JobsPort.cancel_job, Right.CANCEL, is_idempotent=True)


class CatalogRpcs(JobRpcs, service="foretoken.api.catalog.v1.CatalogService"):
    """Of `CatalogAdminPort`."""

    record: Any = ByHand(CatalogAdminPort.record, Right.RECORD, budget=64)
    read_measurements = Table(CatalogAdminPort.read_measurements, Right.READ, is_idempotent=True)
    query_sql = Table(CatalogAdminPort.query_sql, Right.SQL, is_idempotent=True)
    describe_coverage = Unary(CatalogAdminPort.describe_coverage, Right.READ, is_idempotent=True)
    list_runs = Pages(CatalogAdminPort.list_runs, Right.READ, key="run.run_id", is_idempotent=True)
    list_devices = Pages(CatalogAdminPort.list_devices, Right.READ, key="name", is_idempotent=True)
    list_models = Pages(CatalogAdminPort.list_models, Right.READ, key="name", is_idempotent=True)
    describe_snapshot = Unary(
        CatalogAdminPort.describe_snapshot, Right.READ, is_idempotent=True, is_long=True
    )
    create_snapshot = Unary(
        CatalogAdminPort.create_snapshot, Right.PLAN, is_idempotent=True, is_long=True
    )
    list_snapshots = Pages(
        CatalogAdminPort.list_snapshots, Right.READ, key="content_hash", is_idempotent=True
    )
    diff_snapshots = Unary(
        CatalogAdminPort.diff_snapshots, Right.READ, is_idempotent=True, is_long=True
    )
    release_snapshot = Unary(CatalogAdminPort.release_snapshot, Right.DELETE, is_idempotent=True)
    delete_snapshot = Unary(CatalogAdminPort.delete_snapshot, Right.DELETE)
    store_artifact: Any = ByHand(CatalogAdminPort.store_artifact, Right.RECORD)
    read_artifact = Stream(CatalogAdminPort.read_artifact, Right.READ, is_idempotent=True)
    list_artifacts = Pages(
        CatalogAdminPort.list_artifacts, Right.READ, key="name", is_idempotent=True
    )
    activate_artifact = Unary(
        CatalogAdminPort.activate_artifact, Right.ACTIVATE, is_idempotent=True
    )
    delete_artifact = Unary(CatalogAdminPort.delete_artifact, Right.DELETE)
    create_check = Unary(CatalogAdminPort.create_check, Right.PLAN)
    get_check_report = Unary(CatalogAdminPort.get_check_report, Right.READ, is_idempotent=True)
    create_job_record = Unary(CatalogAdminPort.create_job_record, Right.WORK, is_idempotent=True)
    lease_job = Unary(CatalogAdminPort.lease_job, Right.WORK, is_idempotent=True)
    update_job = Unary(CatalogAdminPort.update_job, Right.WORK, is_idempotent=True)
    stop_job = Unary(CatalogAdminPort.stop_job, Right.WORK, is_idempotent=True)
    list_job_records = Pages(
        CatalogAdminPort.list_job_records, Right.WORK, key="job.job_id", is_idempotent=True
    )
    get_job_record = Unary(CatalogAdminPort.get_job_record, Right.WORK, is_idempotent=True)
    read_job_file = Stream(CatalogAdminPort.read_job_file, Right.WORK, is_idempotent=True)
    backup = Stream(CatalogAdminPort.backup, Right.BACKUP)
    prune = Unary(CatalogAdminPort.prune, Right.ADMIN, is_long=True)
    compact = Unary(CatalogAdminPort.compact, Right.ADMIN, is_long=True)


class ProfilerRpcs(JobRpcs, service="foretoken.api.profiler.v1.ProfilerService"):
    """Of `ProfilerPort`."""

    list_local_devices = Unary(ProfilerPort.list_local_devices, Right.READ, is_idempotent=True)
    outline_profile = Unary(
        ProfilerPort.outline_profile, Right.READ, field="profile", is_idempotent=True
    )
    create_profile = Unary(ProfilerPort.create_profile, Right.RECORD, field="profile")
    get_profile_report = Unary(ProfilerPort.get_profile_report, Right.READ, is_idempotent=True)
    create_graph_profile = Unary(ProfilerPort.create_graph_profile, Right.RECORD)
    get_graph_report = Unary(ProfilerPort.get_graph_report, Right.READ, is_idempotent=True)
    create_closure = Unary(ProfilerPort.create_closure, Right.RECORD)
    get_closure_report = Unary(ProfilerPort.get_closure_report, Right.READ, is_idempotent=True)


class PredictorRpcs(JobRpcs, service="foretoken.api.predictor.v1.PredictorService"):
    """Of `PredictorPort`."""

    create_training = Unary(PredictorPort.create_training, Right.PLAN)
    get_training_report = Unary(PredictorPort.get_training_report, Right.READ, is_idempotent=True)
    predict = Unary(
        PredictorPort.predict,
        Right.READ,
        request=_QUERY,
        reply=_REPLY,
        parts=_QUERY_PARTS,
        weigh=lambda query: int(query.ByteSize() // _ROW_BYTES),
        is_idempotent=True,
    )
    tabulate = Unary(
        PredictorPort.tabulate,
        Right.READ,
        reply=_SURFACE,
        weigh=lambda query: math.prod(len(axis.values) for axis in query.axes),
        is_idempotent=True,
    )
    explain = Unary(PredictorPort.explain, Right.READ, request=_QUERY, is_idempotent=True)
    plan_profile = Unary(PredictorPort.plan_profile, Right.READ, is_idempotent=True)
    list_models = Pages(PredictorPort.list_models, Right.READ, key="version", is_idempotent=True)
    activate_model = Unary(PredictorPort.activate_model, Right.ACTIVATE)
    create_correction = Unary(PredictorPort.create_correction, Right.PLAN)
    list_corrections = Pages(
        PredictorPort.list_corrections, Right.READ, key="name", is_idempotent=True
    )


class SimulatorRpcs(JobRpcs, service="foretoken.api.simulator.v1.SimulatorService"):
    """Of `SimulatorPort`."""

    resume_job = Unary(SimulatorPort.resume_job, Right.PLAN)
    list_definitions = Pages(
        SimulatorPort.list_definitions, Right.READ, key="name", is_idempotent=True
    )
    create_serving_simulation = Unary(SimulatorPort.create_serving_simulation, Right.PLAN)
    read_serving_table = Table(SimulatorPort.read_serving_table, Right.READ, is_idempotent=True)
    get_serving_report = Report(
        SimulatorPort.get_serving_report,
        Right.READ,
        tables=read_serving_table,
        has_tables=lambda report: report.was_simulated,
        is_idempotent=True,
    )
    create_training_simulation = Unary(SimulatorPort.create_training_simulation, Right.PLAN)
    read_training_table = Table(SimulatorPort.read_training_table, Right.READ, is_idempotent=True)
    get_training_report = Report(
        SimulatorPort.get_training_report,
        Right.READ,
        tables=read_training_table,
        has_tables=lambda report: report.step_time_ms != 0,
        is_idempotent=True,
    )
    create_capacity_search = Unary(SimulatorPort.create_capacity_search, Right.PLAN)
    get_capacity_report = Unary(SimulatorPort.get_capacity_report, Right.READ, is_idempotent=True)
    create_serving_search = Unary(SimulatorPort.create_serving_search, Right.PLAN)
    read_serving_search_table = Table(
        SimulatorPort.read_serving_search_table, Right.READ, is_idempotent=True
    )
    get_serving_search_report = Report(
        SimulatorPort.get_serving_search_report,
        Right.READ,
        tables=read_serving_search_table,
        is_idempotent=True,
    )
    watch_serving_search = Watch(SimulatorPort.watch_serving_search, Right.READ, budget=64)
    plan_training_memory = Unary(SimulatorPort.plan_training_memory, Right.READ, is_idempotent=True)
    plan_training_run = Unary(SimulatorPort.plan_training_run, Right.PLAN)
    create_training_search = Unary(SimulatorPort.create_training_search, Right.PLAN)
    read_training_search_table = Table(
        SimulatorPort.read_training_search_table, Right.READ, is_idempotent=True
    )
    get_training_search_report = Report(
        SimulatorPort.get_training_search_report,
        Right.READ,
        tables=read_training_search_table,
        is_idempotent=True,
    )
    watch_training_search = Watch(SimulatorPort.watch_training_search, Right.READ, budget=64)


TABLES: tuple[type[RpcTable], ...] = (CatalogRpcs, ProfilerRpcs, PredictorRpcs, SimulatorRpcs)
