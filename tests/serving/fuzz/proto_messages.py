"""The methods of the gRPC port, and good messages for them."""

import random
from typing import Any

import numpy as np
import tensorflow as tf

# TensorFlow Serving's message classes are built at run time, where a type checker cannot see them.
# pyright: reportAttributeAccessIssue=false
from google.protobuf.message import DecodeError
from tensorflow_serving.apis import (
    classification_pb2,
    get_model_metadata_pb2,
    get_model_status_pb2,
    inference_pb2,
    model_management_pb2,
    predict_pb2,
    regression_pb2,
)

from tests.serving.fuzz.cases import MARKER, ServedModel

PREDICTION = "/tensorflow.serving.PredictionService"
_MODEL = "/tensorflow.serving.ModelService"
PREDICT, METADATA = f"{PREDICTION}/Predict", f"{PREDICTION}/GetModelMetadata"
CLASSIFY, REGRESS, MULTI = f"{PREDICTION}/Classify", f"{PREDICTION}/Regress", f"{PREDICTION}/MultiInference"
STATUS, RELOAD = f"{_MODEL}/GetModelStatus", f"{_MODEL}/HandleReloadConfigRequest"

MESSAGES: dict[str, Any] = {
    PREDICT: predict_pb2.PredictRequest,
    METADATA: get_model_metadata_pb2.GetModelMetadataRequest,
    CLASSIFY: classification_pb2.ClassificationRequest,
    REGRESS: regression_pb2.RegressionRequest,
    MULTI: inference_pb2.MultiInferenceRequest,
    STATUS: get_model_status_pb2.GetModelStatusRequest,
    RELOAD: model_management_pb2.ReloadConfigRequest,
}


def decodable(method: str, message: bytes) -> bool:
    """True if these bytes are a message of the method; TensorFlow Serving answers INTERNAL to what is none."""
    try:
        MESSAGES[method].FromString(message)
    except (DecodeError, KeyError):
        return False
    return True


def predict_request(served: ServedModel, ids: list[str | bytes], rows: list[int]) -> Any:
    """A valid request."""
    request = predict_pb2.PredictRequest()
    request.model_spec.name = served.name
    request.inputs["client_id"].CopyFrom(tf.make_tensor_proto(ids, tf.string))
    request.inputs["x"].CopyFrom(tf.make_tensor_proto(served.examples[rows]))
    return request


def valid_predict(rng: random.Random, served: ServedModel) -> tuple[Any, np.ndarray]:
    """A valid request and its answer."""
    ids = [rng.choice([*served.answers, MARKER]) for _ in range(rng.randrange(1, 4))]
    rows = [rng.randrange(len(served.examples)) for _ in ids]
    return predict_request(served, [*ids], rows), served.expected(ids, rows)


def example(served: ServedModel, row: int, client_id: bytes) -> tf.train.Example:
    """One example as classify and regress take it."""
    bytes_list = tf.train.BytesList(value=[client_id])
    floats = tf.train.FloatList(value=np.ravel(served.examples[row]))
    features = {"client_id": tf.train.Feature(bytes_list=bytes_list), "x": tf.train.Feature(float_list=floats)}
    return tf.train.Example(features=tf.train.Features(feature=features))
