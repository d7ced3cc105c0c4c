"""The examples of classify and regress requests, as one tensor."""

from collections.abc import Sequence

import grpc
import numpy as np

from serving.errors import RequestError


def examples_tensor(context: bytes, examples: Sequence[bytes], max_bytes: int) -> np.ndarray:
    """Serialised examples, each with the features that they share.

    Args:
      context: a serialised `tf.train.Example` with the features that all of them share.
      examples: serialised `tf.train.Example` messages.
      max_bytes: most bytes accepted of all together. The context is sent once and copied for each, so a small request
        may stand for many.

    Returns:
      Objects of type bytes, `[n]`.

    Raises:
      RequestError: RESOURCE_EXHAUSTED if the copies are too large.
    """
    if len(context) * len(examples) > max_bytes:
        raise RequestError(
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            f"{len(examples)} examples with a context of {len(context)} bytes each; this server accepts {max_bytes} "
            "bytes of them",
        )
    array = np.empty(len(examples), object)
    # Serialised messages are merged by writing one after the other.
    array[:] = [context + example for example in examples]
    return array
