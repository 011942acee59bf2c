"""The predictor as a remote service, for asyncio."""

from typing import Self

from foretoken.api.predictor.v1 import predictor_service_pb2 as predictor_pb2
from foretoken.api.predictor.v1.predictor_service_pb2_grpc import PredictorServiceStub
from foretoken.client.aio.channel import AsyncConnection
from foretoken.client.aio.jobs import AsyncJobsClient
from foretoken.client.channel_options import ChannelOptions
from foretoken.client.jobs import MAX_PAGE_SIZE
from foretoken.client.predictor import MAX_MODEL_CHANGES
from foretoken.domain.correction import Correction, CorrectionRequest
from foretoken.domain.errors import ServiceUnavailableError
from foretoken.domain.estimate import LatencyQuery, LatencyReply
from foretoken.domain.explanation import Explanation
from foretoken.domain.job import Job
from foretoken.domain.planning import PlanRequest, ProfilePlan
from foretoken.domain.ports import ModelVersion, TrainRequest
from foretoken.domain.report import PredictorTrainingReport
from foretoken.domain.surface import LatencySurface, SurfaceQuery
from foretoken.wire import codec, columns, surfaces


class AsyncPredictorClient(AsyncJobsClient):
    """`PredictorClient`, awaited."""

    def __init__(self, connection: AsyncConnection) -> None:
        """Keep the connection, which must be open."""
        stub = PredictorServiceStub(connection.channel)
        super().__init__(connection, stub)
        self._stub = stub

    @classmethod
    def connect(cls, target: str | ChannelOptions) -> Self:
        """Return a client of the predictor at an address."""
        return cls(AsyncConnection.to(target, "predictor"))

    async def create_training(self, request: TrainRequest) -> Job:
        """Start training on the catalog's present content; the result becomes active."""
        message = codec.encode(request, predictor_pb2.CreateTrainingRequest)
        answer = await self._connection.call(self._stub.CreateTraining, message)
        return codec.decode(answer, Job)

    async def get_training_report(self, job_id: str) -> PredictorTrainingReport:
        """Return the result of a finished training job."""
        request = predictor_pb2.GetTrainingReportRequest(job_id=job_id)
        answer = await self._connection.call(self._stub.GetTrainingReport, request)
        return codec.decode(answer, PredictorTrainingReport)

    async def predict(self, query: LatencyQuery) -> LatencyReply:
        """Return estimates for every row of every table; see `PredictorClient.predict`."""
        parts = [columns.encode_query(part) for part in columns.split_query(query)]
        for _ in range(MAX_MODEL_CHANGES):
            replies = [
                columns.decode_reply(await self._connection.call(self._stub.Predict, part))
                for part in parts
            ]
            if len({reply.model_version for reply in replies}) == 1:
                return columns.join_replies(query, replies)
        raise ServiceUnavailableError("the predictor's model keeps changing; retry later")

    async def tabulate(self, query: SurfaceQuery) -> LatencySurface:
        """Return estimates of one operator over a grid of its dimensions."""
        request = codec.encode(query, predictor_pb2.TabulateRequest)
        answer = await self._connection.call(self._stub.Tabulate, request)
        return surfaces.decode_surface(answer, query)

    async def explain(self, query: LatencyQuery) -> Explanation:
        """Return why the estimate of a single call is what it is."""
        request = predictor_pb2.ExplainRequest(query=columns.encode_query(query))
        answer = await self._connection.call(self._stub.Explain, request)
        return codec.decode(answer, Explanation)

    async def plan_profile(self, request: PlanRequest) -> ProfilePlan:
        """Return which points to profile next, the most useful for its cost first."""
        message = codec.encode(request, predictor_pb2.PlanProfileRequest)
        answer = await self._connection.call(self._stub.PlanProfile, message)
        return codec.decode(answer, ProfilePlan)

    async def list_models(self) -> tuple[ModelVersion, ...]:
        """Return the stored model versions, newest first."""
        request = predictor_pb2.ListModelsRequest(page_size=MAX_PAGE_SIZE)
        pages = self._connection.pages(self._stub.ListModels, request)
        return tuple(
            [codec.decode(message, ModelVersion) async for page in pages for message in page.models]
        )

    async def activate_model(self, version: str) -> ModelVersion:
        """Make a stored version the one that answers."""
        request = predictor_pb2.ActivateModelRequest(version=version)
        answer = await self._connection.call(self._stub.ActivateModel, request)
        return codec.decode(answer, ModelVersion)

    async def create_correction(self, request: CorrectionRequest) -> Correction:
        """Learn a correction from observations, and keep it under its name."""
        message = codec.encode(request, predictor_pb2.CreateCorrectionRequest)
        answer = await self._connection.call(self._stub.CreateCorrection, message)
        return codec.decode(answer, Correction)

    async def list_corrections(self) -> tuple[Correction, ...]:
        """Return the corrections, newest first."""
        request = predictor_pb2.ListCorrectionsRequest(page_size=MAX_PAGE_SIZE)
        pages = self._connection.pages(self._stub.ListCorrections, request)
        return tuple(
            [
                codec.decode(message, Correction)
                async for page in pages
                for message in page.corrections
            ]
        )
