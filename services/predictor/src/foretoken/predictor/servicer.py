"""The predictor over gRPC: proto messages to the port and back."""

import grpc

from foretoken.api.predictor.v1 import predictor_service_pb2 as predictor_pb2
from foretoken.api.types.v1 import (
    correction_pb2,
    explanation_pb2,
    job_pb2,
    planning_pb2,
    report_pb2,
)
from foretoken.domain.correction import CorrectionRequest
from foretoken.domain.planning import PlanRequest
from foretoken.domain.ports import PredictorPort, TrainRequest
from foretoken.domain.surface import SurfaceQuery
from foretoken.wire import codec, columns, surfaces
from foretoken.wire.serving import JobRpcs, register_service, take_page

SERVICE = predictor_pb2.DESCRIPTOR.services_by_name["PredictorService"]
SERVICE_NAME: str = SERVICE.full_name


class PredictorServicer(JobRpcs):
    """Answers the predictor's rpcs."""

    def __init__(self, port: PredictorPort) -> None:
        """Keep the port."""
        super().__init__(port)
        self._port = port

    def predict(
        self, request: predictor_pb2.PredictRequest, _context: grpc.ServicerContext
    ) -> predictor_pb2.PredictResponse:
        """Return estimates for every row of every table."""
        return columns.encode_reply(self._port.predict(columns.decode_query(request)), request)

    def tabulate(
        self, request: predictor_pb2.TabulateRequest, _context: grpc.ServicerContext
    ) -> predictor_pb2.TabulateResponse:
        """Return estimates of one operator over a grid of its dimensions."""
        query = codec.decode(request, SurfaceQuery)
        return surfaces.encode_surface(self._port.tabulate(query))

    def explain(
        self, request: predictor_pb2.ExplainRequest, _context: grpc.ServicerContext
    ) -> explanation_pb2.Explanation:
        """Return why the estimate of a single call is what it is."""
        explanation = self._port.explain(columns.decode_query(request.query))
        return codec.encode(explanation, explanation_pb2.Explanation)

    def plan_profile(
        self, request: predictor_pb2.PlanProfileRequest, _context: grpc.ServicerContext
    ) -> planning_pb2.ProfilePlan:
        """Return which points to profile next."""
        plan = self._port.plan_profile(codec.decode(request, PlanRequest))
        return codec.encode(plan, planning_pb2.ProfilePlan)

    def create_training(
        self, request: predictor_pb2.CreateTrainingRequest, _context: grpc.ServicerContext
    ) -> job_pb2.Job:
        """Start a training job."""
        job = self._port.create_training(codec.decode(request, TrainRequest))
        return codec.encode(job, job_pb2.Job)

    def get_training_report(
        self, request: predictor_pb2.GetTrainingReportRequest, _context: grpc.ServicerContext
    ) -> report_pb2.PredictorTrainingReport:
        """Return the result of a finished training job."""
        report = self._port.get_training_report(request.job_id)
        return codec.encode(report, report_pb2.PredictorTrainingReport)

    def list_models(
        self, request: predictor_pb2.ListModelsRequest, _context: grpc.ServicerContext
    ) -> predictor_pb2.ListModelsResponse:
        """Return a page of model versions, newest first."""
        page, token = take_page(
            self._port.list_models(),
            lambda model: model.version,
            request.page_size,
            request.page_token,
        )
        models = [codec.encode(model, predictor_pb2.ModelVersion) for model in page]
        return predictor_pb2.ListModelsResponse(models=models, next_page_token=token)

    def activate_model(
        self, request: predictor_pb2.ActivateModelRequest, _context: grpc.ServicerContext
    ) -> predictor_pb2.ModelVersion:
        """Make a stored version the one that answers."""
        model = self._port.activate_model(request.version)
        return codec.encode(model, predictor_pb2.ModelVersion)

    def create_correction(
        self, request: predictor_pb2.CreateCorrectionRequest, _context: grpc.ServicerContext
    ) -> correction_pb2.Correction:
        """Learn a correction from observations, and keep it."""
        correction = self._port.create_correction(codec.decode(request, CorrectionRequest))
        return codec.encode(correction, correction_pb2.Correction)

    def list_corrections(
        self, request: predictor_pb2.ListCorrectionsRequest, _context: grpc.ServicerContext
    ) -> predictor_pb2.ListCorrectionsResponse:
        """Return a page of corrections, newest first."""
        page, token = take_page(
            self._port.list_corrections(),
            lambda correction: correction.name,
            request.page_size,
            request.page_token,
        )
        corrections = [codec.encode(found, correction_pb2.Correction) for found in page]
        return predictor_pb2.ListCorrectionsResponse(corrections=corrections, next_page_token=token)


def register(server: grpc.Server, port: PredictorPort) -> None:
    """Let a server answer for this predictor."""
    register_service(server, SERVICE, PredictorServicer(port))
