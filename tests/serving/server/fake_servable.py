"""A servable without TensorFlow's session: `y = scale * x`, with a gate that a test can close and a record of sizes."""

import threading
from pathlib import Path

import numpy as np
import tensorflow as tf

from serving.errors import invalid_argument
from serving.saved_model.signatures import Signature
from tff_pdp.errors import ServingError

MODEL_FILE = "saved_model.pb"


def write_version(base_path: Path, version: int, scale: float = 1.0) -> Path:
    """Writes a folder that `FakeServable` loads."""
    folder = base_path / str(version)
    folder.mkdir(parents=True)
    (folder / MODEL_FILE).write_text(str(scale))
    return folder


def signature(name: str = "serving_default") -> Signature:
    """`x` float32 `[n, 2]` to `y` float32 `[n, 2]`; of the signature `fixed` n is one."""
    definition = tf.compat.v1.saved_model.build_signature_def(method_name=tf.saved_model.PREDICT_METHOD_NAME)
    for tensors, key in ((definition.inputs, "x"), (definition.outputs, "y")):
        tensors[key].dtype = tf.float32.as_datatype_enum
        for size in (1 if name == "fixed" else -1, 2):
            tensors[key].tensor_shape.dim.add().size = size
    return Signature(name, definition)


class FakeServable:
    """Refuses NaN like the graphs of real exports, and folders whose file holds no number."""

    def __init__(self, folder: Path):
        try:
            self.scale = float((folder / MODEL_FILE).read_text())
        except (OSError, ValueError) as error:
            raise ServingError(f"{folder} does not load") from error
        self.gate = threading.Event()
        self.gate.set()
        self.sizes = []
        self.is_closed = False

    def signature(self, name: str) -> Signature:
        return signature(name or "serving_default")

    def run(self, name: str, inputs: dict) -> dict:
        self.sizes.append(len(inputs["x"]))
        assert self.gate.wait(20)
        assert not self.is_closed, "a request ran in a version that was freed"
        if np.isnan(inputs["x"]).any():
            raise invalid_argument("x must be finite")
        return {"y": inputs["x"] * np.float32(self.scale)}

    def close(self) -> None:
        self.is_closed = True
