"""The simulator over gRPC: proto messages to the port and back."""

from collections.abc import Iterator

import grpc

from foretoken.api.simulator.v1 import simulator_service_pb2 as simulator_pb2
from foretoken.api.types.v1 import (
    job_pb2,
    measurement_pb2,
    report_pb2,
    search_pb2,
    training_run_pb2,
    training_search_pb2,
)
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.ports import SimulatorPort
from foretoken.domain.scenario import ServingScenario, TrainingScenario
from foretoken.domain.search import CapacityRequest, ServingSearchRequest
from foretoken.domain.training_run import TrainingRunRequest
from foretoken.domain.training_search import TrainingSearchRequest
from foretoken.wire import codec, ipc
from foretoken.wire.serving import JobRpcs, register_service

SERVICE = simulator_pb2.DESCRIPTOR.services_by_name["SimulatorService"]
SERVICE_NAME: str = SERVICE.full_name


class SimulatorServicer(JobRpcs):
    """Answers the simulator's rpcs."""

    def __init__(self, port: SimulatorPort) -> None:
        """Keep the port."""
        super().__init__(port)
        self._port = port

    def create_serving_simulation(
        self, request: simulator_pb2.CreateServingSimulationRequest, _context: grpc.ServicerContext
    ) -> job_pb2.Job:
        """Start simulating a serving deployment."""
        if not request.HasField("scenario"):
            raise InvalidRequestError.of_field("scenario", "must be set")
        scenario = codec.decode(request.scenario, ServingScenario)
        return codec.encode(self._port.create_serving_simulation(scenario), job_pb2.Job)

    def get_serving_report(
        self, request: simulator_pb2.GetServingReportRequest, _context: grpc.ServicerContext
    ) -> report_pb2.ServingReport:
        """Return the result of a finished serving simulation, without its single requests."""
        report = self._port.get_serving_report(request.job_id)
        return codec.encode(report, report_pb2.ServingReport)

    def read_serving_table(
        self, request: simulator_pb2.ReadServingTableRequest, _context: grpc.ServicerContext
    ) -> Iterator[measurement_pb2.ArrowChunk]:
        """Stream one table of a finished serving simulation."""
        for chunk in ipc.write_chunks(self._port.read_serving_table(request.job_id, request.table)):
            yield measurement_pb2.ArrowChunk(arrow_ipc=chunk)

    def create_training_simulation(
        self, request: simulator_pb2.CreateTrainingSimulationRequest, _context: grpc.ServicerContext
    ) -> job_pb2.Job:
        """Start simulating a training step."""
        if not request.HasField("scenario"):
            raise InvalidRequestError.of_field("scenario", "must be set")
        scenario = codec.decode(request.scenario, TrainingScenario)
        return codec.encode(self._port.create_training_simulation(scenario), job_pb2.Job)

    def get_training_report(
        self, request: simulator_pb2.GetTrainingReportRequest, _context: grpc.ServicerContext
    ) -> report_pb2.TrainingReport:
        """Return the result of a finished training simulation, without its tables."""
        report = self._port.get_training_report(request.job_id)
        return codec.encode(report, report_pb2.TrainingReport)

    def read_training_table(
        self, request: simulator_pb2.ReadTrainingTableRequest, _context: grpc.ServicerContext
    ) -> Iterator[measurement_pb2.ArrowChunk]:
        """Stream one table of a finished training simulation."""
        table = self._port.read_training_table(request.job_id, request.table)
        for chunk in ipc.write_chunks(table):
            yield measurement_pb2.ArrowChunk(arrow_ipc=chunk)

    def create_capacity_search(
        self, request: simulator_pb2.CreateCapacitySearchRequest, _context: grpc.ServicerContext
    ) -> job_pb2.Job:
        """Start looking for the highest rate at which a deployment meets targets."""
        if not request.HasField("request"):
            raise InvalidRequestError.of_field("request", "must be set")
        wanted = codec.decode(request.request, CapacityRequest)
        return codec.encode(self._port.create_capacity_search(wanted), job_pb2.Job)

    def get_capacity_report(
        self, request: simulator_pb2.GetCapacityReportRequest, _context: grpc.ServicerContext
    ) -> search_pb2.CapacityReport:
        """Return the result of a finished capacity search."""
        report = self._port.get_capacity_report(request.job_id)
        return codec.encode(report, search_pb2.CapacityReport)

    def create_serving_search(
        self, request: simulator_pb2.CreateServingSearchRequest, _context: grpc.ServicerContext
    ) -> job_pb2.Job:
        """Start looking for the best deployments of a space."""
        if not request.HasField("request"):
            raise InvalidRequestError.of_field("request", "must be set")
        wanted = codec.decode(request.request, ServingSearchRequest)
        return codec.encode(self._port.create_serving_search(wanted), job_pb2.Job)

    def get_serving_search_report(
        self, request: simulator_pb2.GetServingSearchReportRequest, _context: grpc.ServicerContext
    ) -> search_pb2.ServingSearchReport:
        """Return the result of a finished serving search, without its candidates."""
        report = self._port.get_serving_search_report(request.job_id)
        return codec.encode(report, search_pb2.ServingSearchReport)

    def watch_serving_search(
        self, request: simulator_pb2.WatchServingSearchRequest, context: grpc.ServicerContext
    ) -> Iterator[search_pb2.Finalist]:
        """Stream what a search has simulated until it ends."""
        watch = self._port.watch_serving_search(request.job_id, request.first)
        for finalist in self.hand_on(watch, context):
            yield codec.encode(finalist, search_pb2.Finalist)

    def read_serving_search_table(
        self, request: simulator_pb2.ReadServingSearchTableRequest, _context: grpc.ServicerContext
    ) -> Iterator[measurement_pb2.ArrowChunk]:
        """Stream one table of a finished serving search."""
        table = self._port.read_serving_search_table(request.job_id, request.table)
        for chunk in ipc.write_chunks(table):
            yield measurement_pb2.ArrowChunk(arrow_ipc=chunk)

    def plan_training_memory(
        self, request: simulator_pb2.PlanTrainingMemoryRequest, _context: grpc.ServicerContext
    ) -> training_run_pb2.TrainingMemoryReport:
        """Return what a training step must hold."""
        if not request.HasField("scenario"):
            raise InvalidRequestError.of_field("scenario", "must be set")
        report = self._port.plan_training_memory(codec.decode(request.scenario, TrainingScenario))
        return codec.encode(report, training_run_pb2.TrainingMemoryReport)

    def plan_training_run(
        self, request: simulator_pb2.PlanTrainingRunRequest, _context: grpc.ServicerContext
    ) -> training_run_pb2.TrainingRunReport:
        """Return what a whole training run takes."""
        if not request.HasField("request"):
            raise InvalidRequestError.of_field("request", "must be set")
        report = self._port.plan_training_run(codec.decode(request.request, TrainingRunRequest))
        return codec.encode(report, training_run_pb2.TrainingRunReport)

    def create_training_search(
        self, request: simulator_pb2.CreateTrainingSearchRequest, _context: grpc.ServicerContext
    ) -> job_pb2.Job:
        """Start looking for the best strategies of a space."""
        if not request.HasField("request"):
            raise InvalidRequestError.of_field("request", "must be set")
        wanted = codec.decode(request.request, TrainingSearchRequest)
        return codec.encode(self._port.create_training_search(wanted), job_pb2.Job)

    def get_training_search_report(
        self, request: simulator_pb2.GetTrainingSearchReportRequest, _context: grpc.ServicerContext
    ) -> training_search_pb2.TrainingSearchReport:
        """Return the result of a finished training search, without its candidates."""
        report = self._port.get_training_search_report(request.job_id)
        return codec.encode(report, training_search_pb2.TrainingSearchReport)

    def watch_training_search(
        self, request: simulator_pb2.WatchTrainingSearchRequest, context: grpc.ServicerContext
    ) -> Iterator[training_search_pb2.StrategyFinalist]:
        """Stream what a search has simulated until it ends."""
        watch = self._port.watch_training_search(request.job_id, request.first)
        for finalist in self.hand_on(watch, context):
            yield codec.encode(finalist, training_search_pb2.StrategyFinalist)

    def read_training_search_table(
        self, request: simulator_pb2.ReadTrainingSearchTableRequest, _context: grpc.ServicerContext
    ) -> Iterator[measurement_pb2.ArrowChunk]:
        """Stream one table of a finished training search."""
        table = self._port.read_training_search_table(request.job_id, request.table)
        for chunk in ipc.write_chunks(table):
            yield measurement_pb2.ArrowChunk(arrow_ipc=chunk)


def register(server: grpc.Server, port: SimulatorPort) -> None:
    """Let a server answer for this simulator."""
    register_service(server, SERVICE, SimulatorServicer(port))
