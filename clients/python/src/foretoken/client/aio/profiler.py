"""The profiler as a remote service, for asyncio."""

from typing import Self

from foretoken.api.profiler.v1 import profiler_service_pb2 as profiler_pb2
from foretoken.api.profiler.v1.profiler_service_pb2_grpc import ProfilerServiceStub
from foretoken.api.types.v1 import profiling_pb2
from foretoken.client.aio.channel import AsyncConnection
from foretoken.client.aio.jobs import AsyncJobsClient
from foretoken.client.channel_options import ChannelOptions
from foretoken.domain.job import Job
from foretoken.domain.profiling import (
    ClosureReport,
    ClosureRequest,
    GraphReport,
    GraphRequest,
    ProfileOutline,
    ProfileReport,
    ProfileRequest,
)
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

    async def outline_profile(self, request: ProfileRequest) -> ProfileOutline:
        """Return what a profile would time and for how long, without timing anything."""
        profile = codec.encode(request, profiling_pb2.ProfileRequest)
        message = profiler_pb2.OutlineProfileRequest(profile=profile)
        answer = await self._connection.call(self._stub.OutlineProfile, message)
        return codec.decode(answer, ProfileOutline)

    async def create_profile(self, request: ProfileRequest) -> Job:
        """Start a profiling job."""
        profile = codec.encode(request, profiling_pb2.ProfileRequest)
        message = profiler_pb2.CreateProfileRequest(profile=profile)
        answer = await self._connection.call(self._stub.CreateProfile, message)
        return codec.decode(answer, Job)

    async def get_profile_report(self, job_id: str) -> ProfileReport:
        """Return the result of a finished profiling job."""
        request = profiler_pb2.GetProfileReportRequest(job_id=job_id)
        answer = await self._connection.call(self._stub.GetProfileReport, request)
        return codec.decode(answer, ProfileReport)

    async def create_graph_profile(self, request: GraphRequest) -> Job:
        """Start tracing a model and timing the nodes of its graph."""
        message = codec.encode(request, profiler_pb2.CreateGraphProfileRequest)
        answer = await self._connection.call(self._stub.CreateGraphProfile, message)
        return codec.decode(answer, Job)

    async def get_graph_report(self, job_id: str) -> GraphReport:
        """Return the result of a finished profile of a graph."""
        request = profiler_pb2.GetGraphReportRequest(job_id=job_id)
        answer = await self._connection.call(self._stub.GetGraphReport, request)
        return codec.decode(answer, GraphReport)

    async def create_closure(self, request: ClosureRequest) -> Job:
        """Start timing whole steps of a model, to hold predictions to."""
        message = codec.encode(request, profiler_pb2.CreateClosureRequest)
        answer = await self._connection.call(self._stub.CreateClosure, message)
        return codec.decode(answer, Job)

    async def get_closure_report(self, job_id: str) -> ClosureReport:
        """Return the result of finished closure measurements."""
        request = profiler_pb2.GetClosureReportRequest(job_id=job_id)
        answer = await self._connection.call(self._stub.GetClosureReport, request)
        return codec.decode(answer, ClosureReport)
