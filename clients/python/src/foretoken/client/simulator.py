"""The simulator as a remote service."""

from collections.abc import Callable, Generator, Iterator
from typing import Any, Self, TypeVar

import pyarrow as pa

from foretoken.api.simulator.v1 import simulator_service_pb2 as simulator_pb2
from foretoken.api.simulator.v1.simulator_service_pb2_grpc import SimulatorServiceStub
from foretoken.api.types.v1 import (
    scenario_pb2,
    search_pb2,
    training_run_pb2,
    training_search_pb2,
)
from foretoken.client.channel import Connection
from foretoken.client.channel_options import ChannelOptions
from foretoken.client.jobs import JobsClient, LossCount
from foretoken.domain.errors import ServerBusyError, ServiceUnavailableError
from foretoken.domain.job import Job
from foretoken.domain.report import ServingReport
from foretoken.domain.scenario import ServingScenario, TrainingScenario
from foretoken.domain.search import (
    CapacityReport,
    CapacityRequest,
    Finalist,
    ServingSearchReport,
    ServingSearchRequest,
)
from foretoken.domain.training_report import TrainingReport
from foretoken.domain.training_run import (
    TrainingMemoryReport,
    TrainingRunReport,
    TrainingRunRequest,
)
from foretoken.domain.training_search import (
    StrategyFinalist,
    TrainingSearchReport,
    TrainingSearchRequest,
)
from foretoken.wire import codec, ipc
from foretoken.wire.report_tables import table_fields, with_tables

R = TypeVar("R")


class SimulatorClient(JobsClient):
    """Implements `SimulatorPort` over a connection."""

    def __init__(self, connection: Connection) -> None:
        """Keep the connection, which must be open."""
        stub = SimulatorServiceStub(connection.channel)
        super().__init__(connection, stub)
        self._stub = stub

    @classmethod
    def connect(cls, target: str | ChannelOptions) -> Self:
        """Return a client of the simulator at an address."""
        return cls(Connection.to(target, "simulator"))

    def create_serving_simulation(self, scenario: ServingScenario) -> Job:
        """Start simulating a serving deployment."""
        request = simulator_pb2.CreateServingSimulationRequest(
            scenario=codec.encode(scenario, scenario_pb2.ServingScenario)
        )
        return codec.decode(self._connection.call(self._stub.CreateServingSimulation, request), Job)

    def get_serving_report(self, job_id: str) -> ServingReport:
        """Return the result of a finished serving simulation."""
        answer = self._connection.call(
            self._stub.GetServingReport, simulator_pb2.GetServingReportRequest(job_id=job_id)
        )
        report = codec.decode(answer, ServingReport)
        if not report.feasibility.is_feasible:
            return report
        return _fill(report, lambda table: self.read_serving_table(job_id, table))

    def read_serving_table(self, job_id: str, table: str) -> pa.RecordBatchReader:
        """Return a table of a finished serving simulation, as it arrives."""
        request = simulator_pb2.ReadServingTableRequest(job_id=job_id, table=table)
        chunks = self._connection.stream(self._stub.ReadServingTable, request)
        return ipc.open_chunks(chunk.arrow_ipc for chunk in chunks)

    def create_training_simulation(self, scenario: TrainingScenario) -> Job:
        """Start simulating a training step."""
        request = simulator_pb2.CreateTrainingSimulationRequest(
            scenario=codec.encode(scenario, scenario_pb2.TrainingScenario)
        )
        return codec.decode(
            self._connection.call(self._stub.CreateTrainingSimulation, request), Job
        )

    def get_training_report(self, job_id: str) -> TrainingReport:
        """Return the result of a finished training simulation."""
        request = simulator_pb2.GetTrainingReportRequest(job_id=job_id)
        answer = self._connection.call(self._stub.GetTrainingReport, request)
        report = codec.decode(answer, TrainingReport)
        if report.step_time_ms == 0:
            return report
        return _fill(report, lambda table: self.read_training_table(job_id, table))

    def read_training_table(self, job_id: str, table: str) -> pa.RecordBatchReader:
        """Return a table of a finished training simulation, as it arrives."""
        request = simulator_pb2.ReadTrainingTableRequest(job_id=job_id, table=table)
        chunks = self._connection.stream(self._stub.ReadTrainingTable, request)
        return ipc.open_chunks(chunk.arrow_ipc for chunk in chunks)

    def create_capacity_search(self, request: CapacityRequest) -> Job:
        """Start looking for the highest rate at which a deployment meets targets."""
        message = simulator_pb2.CreateCapacitySearchRequest(
            request=codec.encode(request, search_pb2.CapacityRequest)
        )
        return codec.decode(self._connection.call(self._stub.CreateCapacitySearch, message), Job)

    def get_capacity_report(self, job_id: str) -> CapacityReport:
        """Return the result of a finished capacity search."""
        request = simulator_pb2.GetCapacityReportRequest(job_id=job_id)
        answer = self._connection.call(self._stub.GetCapacityReport, request)
        return codec.decode(answer, CapacityReport)

    def create_serving_search(self, request: ServingSearchRequest) -> Job:
        """Start looking for the best deployments of a space."""
        message = simulator_pb2.CreateServingSearchRequest(
            request=codec.encode(request, search_pb2.ServingSearchRequest)
        )
        return codec.decode(self._connection.call(self._stub.CreateServingSearch, message), Job)

    def get_serving_search_report(self, job_id: str) -> ServingSearchReport:
        """Return the result of a finished serving search."""
        request = simulator_pb2.GetServingSearchReportRequest(job_id=job_id)
        answer = self._connection.call(self._stub.GetServingSearchReport, request)
        report = codec.decode(answer, ServingSearchReport)
        return _fill(report, lambda table: self.read_serving_search_table(job_id, table))

    def read_serving_search_table(self, job_id: str, table: str) -> pa.RecordBatchReader:
        """Return a table of a finished serving search, as it arrives."""
        request = simulator_pb2.ReadServingSearchTableRequest(job_id=job_id, table=table)
        chunks = self._connection.stream(self._stub.ReadServingSearchTable, request)
        return ipc.open_chunks(chunk.arrow_ipc for chunk in chunks)

    def watch_serving_search(self, job_id: str, first: int = 0) -> Generator[Finalist]:
        """Yield what the search has simulated, from the `first` on, until it ends.

        A stream that breaks is taken up again where it broke.
        """

        def watch(first: int) -> Iterator[Any]:
            request = simulator_pb2.WatchServingSearchRequest(job_id=job_id, first=first)
            return self._connection.watch(self._stub.WatchServingSearch, request)

        for message in self._follow(watch, first):
            yield codec.decode(message, Finalist)

    def plan_training_memory(self, scenario: TrainingScenario) -> TrainingMemoryReport:
        """Return what a strategy must hold on every stage."""
        message = simulator_pb2.PlanTrainingMemoryRequest(
            scenario=codec.encode(scenario, scenario_pb2.TrainingScenario)
        )
        answer = self._connection.call(self._stub.PlanTrainingMemory, message)
        return codec.decode(answer, TrainingMemoryReport)

    def plan_training_run(self, request: TrainingRunRequest) -> TrainingRunReport:
        """Return what a whole run takes."""
        message = simulator_pb2.PlanTrainingRunRequest(
            request=codec.encode(request, training_run_pb2.TrainingRunRequest)
        )
        answer = self._connection.call(self._stub.PlanTrainingRun, message)
        return codec.decode(answer, TrainingRunReport)

    def create_training_search(self, request: TrainingSearchRequest) -> Job:
        """Start looking for the best strategies of a space."""
        message = simulator_pb2.CreateTrainingSearchRequest(
            request=codec.encode(request, training_search_pb2.TrainingSearchRequest)
        )
        return codec.decode(self._connection.call(self._stub.CreateTrainingSearch, message), Job)

    def get_training_search_report(self, job_id: str) -> TrainingSearchReport:
        """Return the result of a finished training search."""
        request = simulator_pb2.GetTrainingSearchReportRequest(job_id=job_id)
        answer = self._connection.call(self._stub.GetTrainingSearchReport, request)
        report = codec.decode(answer, TrainingSearchReport)
        return _fill(report, lambda table: self.read_training_search_table(job_id, table))

    def read_training_search_table(self, job_id: str, table: str) -> pa.RecordBatchReader:
        """Return a table of a finished training search, as it arrives."""
        request = simulator_pb2.ReadTrainingSearchTableRequest(job_id=job_id, table=table)
        chunks = self._connection.stream(self._stub.ReadTrainingSearchTable, request)
        return ipc.open_chunks(chunk.arrow_ipc for chunk in chunks)

    def watch_training_search(self, job_id: str, first: int = 0) -> Generator[StrategyFinalist]:
        """Yield what the search has simulated, from the `first` on, until it ends.

        A stream that breaks is taken up again where it broke.
        """

        def watch(first: int) -> Iterator[Any]:
            request = simulator_pb2.WatchTrainingSearchRequest(job_id=job_id, first=first)
            return self._connection.watch(self._stub.WatchTrainingSearch, request)

        for message in self._follow(watch, first):
            yield codec.decode(message, StrategyFinalist)

    def _follow(self, watch: Callable[[int], Iterator[Any]], first: int) -> Iterator[Any]:
        """Yield what a stream sends from the `first` on; where it breaks it is taken up again."""
        losses = LossCount(self._connection.options)
        while True:
            try:
                for message in watch(first):
                    losses.forget()
                    first += 1
                    yield message
            except (ServiceUnavailableError, ServerBusyError) as err:
                losses.add(err)
                self._sleep(losses.delay_s)
            else:
                return


def _fill(report: R, open_table: Callable[[str], pa.RecordBatchReader]) -> R:
    """Return a report with the columns that its message left out."""
    tables = {name: open_table(name).read_all() for name in table_fields(type(report))}
    return with_tables(report, tables)
