"""TensorFlow Serving's gRPC ModelService: states of models, and which are served."""

# TensorFlow Serving's message classes are built at run time, where a type checker cannot see them.
# pyright: reportAttributeAccessIssue=false
from tensorflow_serving.apis import get_model_status_pb2, model_management_pb2

from serving.server.grpc_methods import method_handler
from serving.server.manager import ModelManager
from serving.server.model_messages import requested_spec, status_response
from serving.tf_serving import from_proto


class ModelService:
    """Tells the states of models, and changes which are served.

    Attributes:
      methods: what gRPC calls, by name.
    """

    def __init__(self, manager: ModelManager):
        self._manager = manager
        self.methods = {
            "GetModelStatus": method_handler(get_model_status_pb2.GetModelStatusRequest, self._status),
            "HandleReloadConfigRequest": method_handler(model_management_pb2.ReloadConfigRequest, self._reload),
        }

    async def _status(
        self, request: get_model_status_pb2.GetModelStatusRequest
    ) -> get_model_status_pb2.GetModelStatusResponse:
        """Returns the states of one version, or of all that were seen."""
        return status_response(self._manager, requested_spec(request))

    async def _reload(
        self, request: model_management_pb2.ReloadConfigRequest
    ) -> model_management_pb2.ReloadConfigResponse:
        """Serves the models of the request, and no others; returns when they are loaded."""
        await self._manager.reload(from_proto(request.config))
        return model_management_pb2.ReloadConfigResponse()
