"""Messages about models that both protocols send: what a request names, the state of versions, their signatures."""

import json
from typing import Any

import grpc
from google.protobuf import json_format
from google.protobuf.message import Message

# TensorFlow Serving's message classes are built at run time, where a type checker cannot see them.
# pyright: reportAttributeAccessIssue=false
from tensorflow_serving.apis import get_model_metadata_pb2, get_model_status_pb2, model_pb2

from serving.errors import invalid_argument
from serving.server.loaded_version import LoadedVersion
from serving.server.manager import ModelManager, ModelSpec

SIGNATURE_DEF = "signature_def"


def requested_spec(request: Any) -> ModelSpec:
    """Returns which model and version a message asks for.

    Raises:
      RequestError: INVALID_ARGUMENT if it does not say.
    """
    if not request.HasField("model_spec"):
        raise invalid_argument("Missing ModelSpec")
    message: model_pb2.ModelSpec = request.model_spec
    choice = message.WhichOneof("version_choice")
    return ModelSpec(
        message.name,
        message.version.value if choice == "version" else None,
        message.version_label if choice == "version_label" else None,
    )


def metadata_response(loaded: LoadedVersion) -> get_model_metadata_pb2.GetModelMetadataResponse:
    """Builds the metadata message of a loaded version: its signatures."""
    response = get_model_metadata_pb2.GetModelMetadataResponse()
    response.model_spec.name = loaded.name
    response.model_spec.version.value = loaded.version
    signatures = get_model_metadata_pb2.SignatureDefMap()
    for name, signature in loaded.servable.signatures.items():
        signatures.signature_def[name].CopyFrom(signature)
    response.metadata[SIGNATURE_DEF].Pack(signatures)
    return response


def status_response(manager: ModelManager, spec: ModelSpec) -> get_model_status_pb2.GetModelStatusResponse:
    """Builds the status message of the version that a request names by number, or else of all, newest first.

    Raises:
      RequestError: NOT_FOUND for an unknown model or version.
    """
    response = get_model_status_pb2.GetModelStatusResponse()
    for status in manager.statuses(spec.name, spec.version):
        entry = response.model_version_status.add()
        entry.version = status.version
        entry.state = get_model_status_pb2.ModelVersionStatus.State.Value(status.state)
        if status.error:
            entry.status.error_code = grpc.StatusCode.UNKNOWN.value[0]
            entry.status.error_message = status.error
    return response


def metadata_json(loaded: LoadedVersion) -> bytes:
    """Writes the metadata of a loaded version as JSON."""
    message = _to_dict(metadata_response(loaded))
    # The Any wrapper names its type; TensorFlow Serving leaves that out.
    for field in message["metadata"].values():
        field.pop("@type", None)
    return json.dumps(message).encode()


def status_json(manager: ModelManager, spec: ModelSpec) -> bytes:
    """Writes the states of versions as JSON; see `status_response`."""
    message = _to_dict(status_response(manager, spec))
    for entry in message["model_version_status"]:
        entry.setdefault("status", {"error_code": "OK", "error_message": ""})
    return json.dumps(message).encode()


def _to_dict(message: Message) -> dict[str, Any]:
    """Writes every field under its own name, zeros included, as TensorFlow Serving does."""
    return json_format.MessageToDict(
        message,
        preserving_proto_field_name=True,
        including_default_value_fields=True,  # pyright: ignore[reportCallIssue]  # Named differently from protobuf 5 on.
    )
