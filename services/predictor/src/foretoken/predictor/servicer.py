"""The predictor over gRPC: proto messages to the port and back."""

import grpc

from foretoken.api.predictor.v1 import predictor_service_pb2 as predictor_pb2
from foretoken.api.types.v1 import job_pb2, report_pb2
from foretoken.domain.ports import PredictorPort, TrainRequest
from foretoken.wire import codec, columns
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


def register(server: grpc.Server, port: PredictorPort) -> None:
    """Let a server answer for this predictor."""
    register_service(server, SERVICE, PredictorServicer(port))
