"""The profiler as a remote service, for asyncio."""

from typing import Self

from foretoken.api.profiler.v1 import profiler_service_pb2 as profiler_pb2
from foretoken.api.profiler.v1.profiler_service_pb2_grpc import ProfilerServiceStub
from foretoken.client.aio.channel import AsyncConnection
from foretoken.client.aio.jobs import AsyncJobsClient
from foretoken.client.channel import ChannelOptions
from foretoken.domain.job import Job
from foretoken.domain.ports import ProfileRequest
from foretoken.domain.report import ProfileReport
from foretoken.wire import codec


class AsyncProfilerClient(AsyncJobsClient):
    """`ProfilerClient`, awaited."""

    def __init__(self, connection: AsyncConnection) -> None:
        """Keep the connection, which must be open."""
        stub = ProfilerServiceStub(connection.channel)
        super().__init__(connection, stub)
        self._stub = stub

    @classmethod
    def connect(cls, target: str | ChannelOptions) -> Self:
        """Return a client of the profiler at an address."""
        return cls(AsyncConnection.to(target, "profiler"))

    async def list_local_devices(self) -> tuple[str, ...]:
        """Return the names of the devices present at the profiler."""
        request = profiler_pb2.ListLocalDevicesRequest()
        return tuple((await self._connection.call(self._stub.ListLocalDevices, request)).devices)

    async def create_profile(self, request: ProfileRequest) -> Job:
        """Start a profiling job."""
        message = codec.encode(request, profiler_pb2.CreateProfileRequest)
        answer = await self._connection.call(self._stub.CreateProfile, message)
        return codec.decode(answer, Job)

    async def get_profile_report(self, job_id: str) -> ProfileReport:
        """Return the result of a finished profiling job."""
        request = profiler_pb2.GetProfileReportRequest(job_id=job_id)
        answer = await self._connection.call(self._stub.GetProfileReport, request)
        return codec.decode(answer, ProfileReport)
