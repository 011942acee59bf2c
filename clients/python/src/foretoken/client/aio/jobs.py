"""Jobs of a remote service, for asyncio."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol, Self

import grpc

from foretoken.api.types.v1 import job_pb2
from foretoken.client.aio.channel import AsyncConnection
from foretoken.client.jobs import MAX_PAGE_SIZE, WatchState
from foretoken.domain.errors import ServerBusyError, ServiceUnavailableError
from foretoken.domain.job import Job
from foretoken.wire import codec


class AsyncJobStub(Protocol):
    """The job methods that every generated stub has."""

    GetJob: "grpc.aio.UnaryUnaryMultiCallable[job_pb2.GetJobRequest, job_pb2.Job]"
    ListJobs: "grpc.aio.UnaryUnaryMultiCallable[job_pb2.ListJobsRequest, job_pb2.ListJobsResponse]"
    WatchJob: "grpc.aio.UnaryStreamMultiCallable[job_pb2.WatchJobRequest, job_pb2.Job]"
    CancelJob: "grpc.aio.UnaryUnaryMultiCallable[job_pb2.CancelJobRequest, job_pb2.Job]"


class AsyncJobsClient:
    """`JobsClient`, awaited."""

    def __init__(
        self,
        connection: AsyncConnection,
        stub: AsyncJobStub,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Keep the connection and the service's stub."""
        self._connection = connection
        self._job_stub = stub
        self._sleep = sleep

    async def close(self) -> None:
        """Close the connection."""
        await self._connection.close()

    async def __aenter__(self) -> Self:
        """Return the client."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the connection."""
        await self.close()

    async def get_job(self, job_id: str) -> Job:
        """Return the job's present state."""
        request = job_pb2.GetJobRequest(job_id=job_id)
        answer = await self._connection.call(self._job_stub.GetJob, request)
        return codec.decode(answer, Job)

    async def list_jobs(self) -> tuple[Job, ...]:
        """Return all jobs, newest first."""
        request = job_pb2.ListJobsRequest(page_size=MAX_PAGE_SIZE)
        pages = self._connection.pages(self._job_stub.ListJobs, request)
        return tuple([codec.decode(message, Job) async for page in pages for message in page.jobs])

    async def watch_job(self, job_id: str) -> AsyncIterator[Job]:
        """Yield the job now and at its changes until it is final; see `JobsClient.watch_job`."""
        watch = WatchState(self._connection.options)
        request = job_pb2.WatchJobRequest(job_id=job_id)
        while not watch.is_over:
            try:
                async for message in self._connection.watch(self._job_stub.WatchJob, request):
                    job = codec.decode(message, Job)
                    if watch.accept(job):
                        yield job
            except ServiceUnavailableError as err:
                watch.lose(err)
            except ServerBusyError as err:
                job = await self.get_job(job_id)
                if watch.accept(job):
                    yield job
                watch.refuse(err)
            if not watch.is_over:
                await self._sleep(watch.delay_s)

    async def cancel_job(self, job_id: str) -> Job:
        """Ask the job to stop; a final job is left as it is."""
        request = job_pb2.CancelJobRequest(job_id=job_id)
        answer = await self._connection.call(self._job_stub.CancelJob, request)
        return codec.decode(answer, Job)
