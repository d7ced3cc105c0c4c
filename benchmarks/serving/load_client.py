"""Sends the same gRPC request repeatedly from several tasks, and prints one line of JSON; run as a program.

python -m benchmarks.serving.load_client HOST:PORT MODEL CONCURRENT BATCH_SIZE SECONDS
"""

import asyncio
import json
import sys
import time

import grpc
import numpy as np
import tensorflow as tf
from tensorflow_serving.apis import predict_pb2

from benchmarks.serving.layouts import NUM_FEATURES, client_id


async def send_requests(address: str, request: bytes, concurrent: int, seconds: float) -> list[float]:
    """Sends requests; returns the seconds of each answered request, and raises on the first request that fails."""
    taken: list[float] = []
    async with grpc.aio.insecure_channel(address) as channel:
        predict = channel.unary_unary("/tensorflow.serving.PredictionService/Predict")
        for _ in range(50):
            await predict(request)
        end = time.perf_counter() + seconds

        async def repeat() -> None:
            while (started := time.perf_counter()) < end:
                await predict(request)
                taken.append(time.perf_counter() - started)

        await asyncio.gather(*(repeat() for _ in range(concurrent)))
    return taken


def main() -> None:
    """Sends requests, and prints requests per second and percentiles."""
    address, model_name = sys.argv[1:3]
    concurrent, batch_size, seconds = int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5])
    request = predict_pb2.PredictRequest()  # pyright: ignore[reportAttributeAccessIssue]
    request.model_spec.name = model_name
    ids = [client_id(number) for number in range(batch_size)]
    x = np.random.default_rng(0).standard_normal((batch_size, NUM_FEATURES), np.float32)
    request.inputs["client_id"].CopyFrom(tf.make_tensor_proto(ids, tf.string))
    request.inputs["x"].CopyFrom(tf.make_tensor_proto(x))
    taken = asyncio.run(send_requests(address, request.SerializeToString(), concurrent, seconds))
    p50, p99 = (1e3 * float(np.percentile(taken, percent)) for percent in (50, 99))
    print(json.dumps({"requests_per_s": len(taken) / seconds, "p50_ms": p50, "p99_ms": p99}))


if __name__ == "__main__":
    main()
