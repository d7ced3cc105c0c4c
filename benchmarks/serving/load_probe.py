"""Loads one or several exports as the server does, and prints the cost as one line of JSON; run as a program.

python -m benchmarks.serving.load_probe VERSION_FOLDER...
"""

import json
import sys
import time
from pathlib import Path

import numpy as np
import psutil

from serving.saved_model.servable import Servable, load_servable

CALLS, BATCH = 200, 64


def main() -> None:
    """Loads and calls the exports, and prints the cost."""
    # The cost of a first session and a first graph is not a cost of the models.
    import tensorflow as tf

    with tf.Graph().as_default(), tf.compat.v1.Session(config=tf.compat.v1.ConfigProto(device_count={"GPU": 0})) as one:
        one.run(tf.constant(1.0) + 1.0)
    process = psutil.Process()
    base = process.memory_info().rss
    started = time.perf_counter()
    servables = [load_servable(Path(folder)) for folder in sys.argv[1:]]
    load_s = time.perf_counter() - started
    loaded = process.memory_info().rss
    for servable in servables:
        _call(servable)
    called = process.memory_info().rss
    print(json.dumps({"load_s": load_s, "rss_mb": (loaded - base) / 1e6, "rss_after_calls_mb": (called - base) / 1e6}))


def _call(servable: Servable) -> None:
    random = np.random.default_rng(0)
    inputs = {"client_id": np.array([""] * BATCH, object), "x": random.standard_normal((BATCH, 64), np.float32)}
    for _ in range(CALLS):
        servable.predict("", inputs)


if __name__ == "__main__":
    main()
