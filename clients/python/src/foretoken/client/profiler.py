"""The profiler as a remote service."""

from typing import Self

from foretoken.api.profiler.v1 import profiler_service_pb2 as profiler_pb2
from foretoken.api.profiler.v1.profiler_service_pb2_grpc import ProfilerServiceStub
from foretoken.client.channel import ChannelOptions, Connection
from foretoken.client.jobs import JobsClient
from foretoken.domain.job import Job
from foretoken.domain.ports import ProfileRequest
from foretoken.domain.report import ProfileReport
from foretoken.wire import codec


class ProfilerClient(JobsClient):
    """Implements `ProfilerPort` over a connection."""

    def __init__(self, connection: Connection) -> None:
        """Keep the connection, which must be open."""
        stub = ProfilerServiceStub(connection.channel)
        super().__init__(connection, stub)
        self._stub = stub

    @classmethod
    def connect(cls, target: str | ChannelOptions) -> Self:
        """Return a client of the profiler at an address."""
        return cls(Connection.to(target, "profiler"))

    def list_local_devices(self) -> tuple[str, ...]:
        """Return the names of the devices present at the profiler."""
        request = profiler_pb2.ListLocalDevicesRequest()
        return tuple(self._connection.call(self._stub.ListLocalDevices, request).devices)

    def create_profile(self, request: ProfileRequest) -> Job:
        """Start a profiling job."""
        message = codec.encode(request, profiler_pb2.CreateProfileRequest)
        return codec.decode(self._connection.call(self._stub.CreateProfile, message), Job)

    def get_profile_report(self, job_id: str) -> ProfileReport:
        """Return the result of a finished profiling job."""
        request = profiler_pb2.GetProfileReportRequest(job_id=job_id)
        answer = self._connection.call(self._stub.GetProfileReport, request)
        return codec.decode(answer, ProfileReport)
