"""The profiler over gRPC: proto messages to the port and back."""

import grpc

from foretoken.api.profiler.v1 import profiler_service_pb2 as profiler_pb2
from foretoken.api.types.v1 import job_pb2, profiling_pb2, report_pb2
from foretoken.domain.ports import ProfilerPort
from foretoken.domain.profiling import ClosureRequest, GraphRequest, ProfileRequest
from foretoken.wire import codec
from foretoken.wire.serving import JobRpcs, register_service

SERVICE = profiler_pb2.DESCRIPTOR.services_by_name["ProfilerService"]
SERVICE_NAME: str = SERVICE.full_name


class ProfilerServicer(JobRpcs):
    """Answers the profiler's rpcs."""

    def __init__(self, port: ProfilerPort) -> None:
        """Keep the port."""
        super().__init__(port)
        self._port = port

    def list_local_devices(
        self, _request: profiler_pb2.ListLocalDevicesRequest, _context: grpc.ServicerContext
    ) -> profiler_pb2.ListLocalDevicesResponse:
        """Return the devices of this machine."""
        return profiler_pb2.ListLocalDevicesResponse(devices=self._port.list_local_devices())

    def outline_profile(
        self, request: profiler_pb2.OutlineProfileRequest, _context: grpc.ServicerContext
    ) -> profiling_pb2.ProfileOutline:
        """Return what a profile would time."""
        outline = self._port.outline_profile(codec.decode(request.profile, ProfileRequest))
        return codec.encode(outline, profiling_pb2.ProfileOutline)

    def create_profile(
        self, request: profiler_pb2.CreateProfileRequest, _context: grpc.ServicerContext
    ) -> job_pb2.Job:
        """Start a profiling job."""
        job = self._port.create_profile(codec.decode(request.profile, ProfileRequest))
        return codec.encode(job, job_pb2.Job)

    def get_profile_report(
        self, request: profiler_pb2.GetProfileReportRequest, _context: grpc.ServicerContext
    ) -> report_pb2.ProfileReport:
        """Return the result of a finished profiling job."""
        report = self._port.get_profile_report(request.job_id)
        return codec.encode(report, report_pb2.ProfileReport)

    def create_graph_profile(
        self, request: profiler_pb2.CreateGraphProfileRequest, _context: grpc.ServicerContext
    ) -> job_pb2.Job:
        """Start profiling a model's graph."""
        job = self._port.create_graph_profile(codec.decode(request, GraphRequest))
        return codec.encode(job, job_pb2.Job)

    def get_graph_report(
        self, request: profiler_pb2.GetGraphReportRequest, _context: grpc.ServicerContext
    ) -> profiling_pb2.GraphReport:
        """Return the result of a finished profile of a graph."""
        report = self._port.get_graph_report(request.job_id)
        return codec.encode(report, profiling_pb2.GraphReport)

    def create_closure(
        self, request: profiler_pb2.CreateClosureRequest, _context: grpc.ServicerContext
    ) -> job_pb2.Job:
        """Start closure measurements."""
        job = self._port.create_closure(codec.decode(request, ClosureRequest))
        return codec.encode(job, job_pb2.Job)

    def get_closure_report(
        self, request: profiler_pb2.GetClosureReportRequest, _context: grpc.ServicerContext
    ) -> profiling_pb2.ClosureReport:
        """Return the result of finished closure measurements."""
        report = self._port.get_closure_report(request.job_id)
        return codec.encode(report, profiling_pb2.ClosureReport)


def register(server: grpc.Server, port: ProfilerPort) -> None:
    """Let a server answer for this profiler."""
    register_service(server, SERVICE, ProfilerServicer(port))
