"""Jobs of a remote service: shared by the clients of all services that have jobs."""

import time
from collections.abc import Callable, Iterator
from typing import Protocol, Self

import grpc

from foretoken.api.types.v1 import job_pb2
from foretoken.client.channel import Connection
from foretoken.client.channel_options import ChannelOptions
from foretoken.domain.errors import ServerBusyError, ServiceUnavailableError, StreamIdleError
from foretoken.domain.job import Job
from foretoken.wire import codec

MAX_PAGE_SIZE = 1_000


class JobStub(Protocol):
    """The job methods that every generated stub has."""

    GetJob: "grpc.UnaryUnaryMultiCallable[job_pb2.GetJobRequest, job_pb2.Job]"
    ListJobs: "grpc.UnaryUnaryMultiCallable[job_pb2.ListJobsRequest, job_pb2.ListJobsResponse]"
    WatchJob: "grpc.UnaryStreamMultiCallable[job_pb2.WatchJobRequest, job_pb2.Job]"
    CancelJob: "grpc.UnaryUnaryMultiCallable[job_pb2.CancelJobRequest, job_pb2.Job]"


class JobsClient:
    """Implements `JobsPort` over a connection."""

    def __init__(
        self, connection: Connection, stub: JobStub, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        """Keep the connection and the service's stub."""
        self._connection = connection
        self._job_stub = stub
        self._sleep = sleep

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def __enter__(self) -> Self:
        """Return the client."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the connection."""
        self.close()

    def get_job(self, job_id: str) -> Job:
        """Return the job's present state."""
        request = job_pb2.GetJobRequest(job_id=job_id)
        return codec.decode(self._connection.call(self._job_stub.GetJob, request), Job)

    def list_jobs(self) -> tuple[Job, ...]:
        """Return all jobs, newest first."""
        request = job_pb2.ListJobsRequest(page_size=MAX_PAGE_SIZE)
        pages = self._connection.pages(self._job_stub.ListJobs, request)
        return tuple(codec.decode(message, Job) for page in pages for message in page.jobs)

    def watch_job(self, job_id: str) -> Iterator[Job]:
        """Yield the job now and at its changes until it is final, the final state last.

        A stream that breaks or ends is taken up again; where the service has no stream to spare,
        the state is asked for now and then.
        """
        watch = WatchState(self._connection.options)
        while not watch.is_over:
            try:
                for job in self._stream_states(job_id):
                    if watch.accept(job):
                        yield job
            except ServiceUnavailableError as err:
                watch.lose(err)
            except ServerBusyError as err:
                job = self.get_job(job_id)
                if watch.accept(job):
                    yield job
                watch.refuse(err)
            if not watch.is_over:
                self._sleep(watch.delay_s)

    def cancel_job(self, job_id: str) -> Job:
        """Ask the job to stop; a final job is left as it is."""
        request = job_pb2.CancelJobRequest(job_id=job_id)
        return codec.decode(self._connection.call(self._job_stub.CancelJob, request), Job)

    def _stream_states(self, job_id: str) -> Iterator[Job]:
        request = job_pb2.WatchJobRequest(job_id=job_id)
        for message in self._connection.watch(self._job_stub.WatchJob, request):
            yield codec.decode(message, Job)


class LossCount:
    """How often a stream broke or was refused in a row, and how long to wait before the next."""

    def __init__(self, options: ChannelOptions) -> None:
        """Begin with none."""
        self._options = options
        self.forget()

    @property
    def delay_s(self) -> float:
        """Seconds to wait before the next stream, doubling with every loss in a row."""
        return self._options.delay_after(self._num_losses, self._retry_after_s)

    def forget(self) -> None:
        """Begin anew, as something has arrived."""
        self._num_losses = 0
        self._retry_after_s = 0.0

    def refuse(self, error: ServerBusyError) -> None:
        """Take note of how long a busy server wants to be left alone."""
        self._retry_after_s = error.retry_after_s

    def add(self, error: ServiceUnavailableError | ServerBusyError) -> None:
        """Take note of a stream that broke or was refused, or was ended for want of news.

        Raises:
            ServiceUnavailableError, ServerBusyError: the same, when it was too often in a row.

        """
        if isinstance(error, StreamIdleError):
            self.forget()
            return
        if isinstance(error, ServerBusyError):
            self.refuse(error)
        self._num_losses += 1
        if self._num_losses > self._options.max_reconnects:
            raise error


class WatchState:
    """What a watch has seen over several streams, and how long to wait before the next."""

    def __init__(self, options: ChannelOptions) -> None:
        """Begin with nothing seen."""
        self._losses = LossCount(options)
        self._seen: Job | None = None

    @property
    def is_over(self) -> bool:
        """Whether the final state was seen."""
        return self._seen is not None and self._seen.state.is_final

    @property
    def delay_s(self) -> float:
        """Seconds to wait before the next stream, doubling with every loss in a row."""
        return self._losses.delay_s

    def accept(self, job: Job) -> bool:
        """Take note of a state, and return whether it is new."""
        self._losses.forget()
        is_new = job != self._seen
        self._seen = job
        return is_new

    def refuse(self, error: ServerBusyError) -> None:
        """Take note of how long a busy server wants to be left alone."""
        self._losses.refuse(error)

    def lose(self, error: ServiceUnavailableError) -> None:
        """Take note of a broken stream.

        Raises:
            ServiceUnavailableError: the same, when streams broke too often in a row.

        """
        self._losses.add(error)
