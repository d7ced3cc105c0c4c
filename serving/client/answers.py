"""Defines the results of calls to a server: predictions, states of versions, and signatures of a model."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

SIGNATURE_FIELD = "signature_def"


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The answer of `predict` to `n` examples.

    Attributes:
      answers: class probabilities, float32 `[n, num_classes]`, or for a regression predicted values, float32 `[n]`.
      personalized: bool `[n]`; false where the client is unknown and the global model answered.
    """

    answers: np.ndarray
    personalized: np.ndarray


@dataclasses.dataclass(frozen=True)
class Classification:
    """The answer of `classify` to `n` examples: `k` class labels, string `[n, k]`, and scores, float32 `[n, k]`."""

    classes: np.ndarray
    scores: np.ndarray


@dataclasses.dataclass(frozen=True)
class Regression:
    """The answer of `regress` to `n` examples: predicted values, float32 `[n]`."""

    values: np.ndarray


@dataclasses.dataclass(frozen=True)
class VersionState:
    """One version that a server has seen.

    Attributes:
      version: number of the version.
      state: `START`, `LOADING`, `AVAILABLE`, `UNLOADING` or `END`.
      error_code: `OK`, or the gRPC code of the error that ended the version.
      error_message: message of the error in `error_code`; empty if there is none.
    """

    version: int
    state: str
    error_code: str = "OK"
    error_message: str = ""

    @property
    def available(self) -> bool:
        """Returns whether the version answers requests."""
        return self.state == "AVAILABLE"


@dataclasses.dataclass(frozen=True)
class TensorDescription:
    """An input or output of a signature.

    Attributes:
      dtype: name of the dtype in TensorFlow's protos, such as `DT_FLOAT`.
      shape: size of each dimension, None for any size; None in place of the tuple if the rank may be any.
    """

    dtype: str
    shape: tuple[int | None, ...] | None


@dataclasses.dataclass(frozen=True)
class Signature:
    """One signature of a model: inputs and outputs by key, and TensorFlow Serving's name of the method."""

    inputs: Mapping[str, TensorDescription]
    outputs: Mapping[str, TensorDescription]
    method_name: str


@dataclasses.dataclass(frozen=True)
class ModelMetadata:
    """The name and number of a loaded version, and the version's signatures by name."""

    model_name: str
    version: int
    signatures: Mapping[str, Signature]


def answers_name(outputs: Collection[str]) -> str:
    """Returns the key of the answers in a personal model's `outputs`: `values` if present, else `probabilities`."""
    return "values" if "values" in outputs else "probabilities"


def version_states(document: Mapping[str, Any]) -> list[VersionState]:
    """Reads the JSON form of a `GetModelStatusResponse`; raises KeyError, TypeError or ValueError for other JSON."""
    states = []
    for entry in document["model_version_status"]:
        status = entry.get("status", {})
        code, message = status.get("error_code", "OK"), status.get("error_message", "")
        states.append(VersionState(int(entry["version"]), entry["state"], code, message))
    return states


def metadata(document: Mapping[str, Any]) -> ModelMetadata:
    """Reads the JSON form of a `GetModelMetadataResponse`; raises KeyError, TypeError or ValueError for other JSON."""
    spec = document["model_spec"]
    signatures = document["metadata"][SIGNATURE_FIELD]["signature_def"]
    read = {
        name: Signature(_tensors(value["inputs"]), _tensors(value["outputs"]), value["method_name"])
        for name, value in signatures.items()
    }
    return ModelMetadata(spec["name"], int(spec["version"]), read)


def _tensors(document: Mapping[str, Any]) -> dict[str, TensorDescription]:
    return {key: TensorDescription(value["dtype"], _shape(value["tensor_shape"])) for key, value in document.items()}


def _shape(document: Mapping[str, Any]) -> tuple[int | None, ...] | None:
    if document.get("unknown_rank"):
        return None
    sizes = [int(dimension["size"]) for dimension in document.get("dim", ())]
    return tuple(None if size < 0 else size for size in sizes)
