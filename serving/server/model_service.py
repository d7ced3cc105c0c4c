"""TensorFlow Serving's gRPC ModelService: states of models, and which are served."""

import grpc

# TensorFlow Serving's message classes are built at run time, where a type checker cannot see them.
# pyright: reportAttributeAccessIssue=false
from tensorflow_serving.apis import get_model_status_pb2, model_management_pb2, model_service_pb2_grpc

from serving.server.grpc_answers import answer
from serving.server.manager import ModelManager
from serving.server.model_config import from_proto
from serving.server.model_messages import requested_spec, status_response


class ModelService(model_service_pb2_grpc.ModelServiceServicer):
    """Tells the states of models, and changes which are served."""

    def __init__(self, manager: ModelManager):
        self._manager = manager

    async def GetModelStatus(
        self, request: get_model_status_pb2.GetModelStatusRequest, context: grpc.aio.ServicerContext
    ):
        """Returns the states of one version, or of all that were seen."""
        return await answer(context, self._status(request))

    async def HandleReloadConfigRequest(
        self, request: model_management_pb2.ReloadConfigRequest, context: grpc.aio.ServicerContext
    ):
        """Serves the models of the request, and no others; returns when they are loaded."""
        return await answer(context, self._reload(request))

    async def _status(self, request: get_model_status_pb2.GetModelStatusRequest):
        return status_response(self._manager, requested_spec(request))

    async def _reload(
        self, request: model_management_pb2.ReloadConfigRequest
    ) -> model_management_pb2.ReloadConfigResponse:
        await self._manager.reload(from_proto(request.config))
        return model_management_pb2.ReloadConfigResponse()
