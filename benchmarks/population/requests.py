"""Starts a server with an export, sends requests of single users, and prints one line of JSON; run as a program.

python -m benchmarks.population.requests EXPORT MODEL CLIENT_ID_KEY USERS REQUESTS
"""

import json
import sys
import time
from pathlib import Path

import numpy as np

from benchmarks.population.users import SHAPE, user_name
from benchmarks.serving.run import running_server
from serving.client.grpc_client import GrpcClient
from serving.client_ids import ClientIdHash


def main() -> None:
    """Sends the requests, one after another, and prints latencies and the share of answers of personal models."""
    base_path, model_name, key_path = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    num_users, num_requests = int(sys.argv[4]), int(sys.argv[5])
    generator = np.random.default_rng(0)
    exported_id = ClientIdHash.load(key_path)
    started = time.perf_counter()
    with running_server(base_path, model_name) as (port, _), GrpcClient(f"127.0.0.1:{port}") as client:
        start_s = time.perf_counter() - started
        seconds, known = [], 0
        for number in generator.integers(0, num_users, num_requests):
            user = exported_id(user_name(int(number)))
            x = generator.random((1, *SHAPE), np.float32)
            sent = time.perf_counter()
            answer = client.predict(model_name, [user], x)
            seconds.append(time.perf_counter() - sent)
            known += int(answer.personalized[0])
    p50, p99 = (1e3 * float(np.percentile(seconds, percent)) for percent in (50, 99))
    print(json.dumps({"start_s": start_s, "p50_ms": p50, "p99_ms": p99, "personalized": known / num_requests}))


if __name__ == "__main__":
    main()
