"""The server under attack: a small export, canary files around it, and the real command in a process of its own."""

import contextlib
import dataclasses
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import tensorflow as tf

from serving.export.exporter import export_models
from serving.export.versions import hold
from serving.models import PersonalModels
from serving.verify.fresh_process import FreshProcess
from tests.serving.fuzz.cases import ServedModel
from tff_pdp.models.dense import build_mlp

MODEL_NAME = "toy"
_INPUT_SHAPE = (4, 4, 1)
_NUM_CLASSES = 3
_KNOWN_IDS = ("alice", "bob", "é ü")
_START_SECONDS = 120.0


@dataclasses.dataclass(frozen=True)
class Target:
    """A running server.

    Attributes:
      process: its process.
      rest_port: the REST port.
      grpc_port: the gRPC port.
      log: the file its standard output and errors go to.
    """

    process: subprocess.Popen
    rest_port: int
    grpc_port: int
    log: Path


def export_model(root: Path) -> ServedModel:
    """Exports a model to `root/models/toy` and lays out canaries where names that are taken for paths would lead."""
    base_path = root / "models" / MODEL_NAME
    model = build_mlp(_INPUT_SHAPE, num_classes=_NUM_CLASSES, hidden_units=(4,))
    # Eighths are exact in float32 and short as decimals.
    examples = np.random.default_rng(0).integers(-16, 17, (8, *_INPUT_SHAPE)).astype(np.float32) / 8
    weights = {client_id: model.init(seed) for seed, client_id in enumerate(["", *_KNOWN_IDS])}
    models = PersonalModels(
        model,
        _KNOWN_IDS,
        rows=np.arange(1, 1 + len(_KNOWN_IDS), dtype=np.int32),
        shared={},
        stacked={name: np.stack([one[name] for one in weights.values()]) for name in weights[""]},
    )
    with hold(base_path) as held, FreshProcess() as process:
        export_models(held, models, model_name=MODEL_NAME, privacy_report={}, model_card={}, process=process)
    answers = {
        key: tf.nn.softmax(model.predict(value, tf.constant(examples))).numpy() for key, value in weights.items()
    }
    names = [name for path in canaries(root) for name in _names_of(path, base_path)]
    return ServedModel(MODEL_NAME, _INPUT_SHAPE, examples, answers, names)


def canaries(root: Path) -> list[Path]:
    """Files and folders outside the model's folder that nothing may open; made if missing."""
    files = [root / "etc" / "passwd", root / "models" / "etc" / "passwd", root / "canary" / "1" / "saved_model.pb"]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    return [*files, root / "canary", root / "canary" / "1"]


def _names_of(path: Path, base_path: Path) -> list[str]:
    return [
        str(path),
        os.path.relpath(path, base_path),
        os.path.relpath(path, base_path.parent),
        f"{MODEL_NAME}/{path}",
    ]


@contextlib.contextmanager
def running_target(root: Path, options: Sequence[str] = ()) -> Iterator[Target]:
    """Serves `root/models/toy` by the command line in a child process, and ends it afterwards.

    Raises:
      AssertionError: it does not come up, or does not end when asked to.
    """
    log = root / "server.log"
    command = [sys.executable, "-m", "tff_pdp.cli", "serve", "--model-base-path", str(root / "models" / MODEL_NAME)]
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [*command, "--rest-port", "0", "--grpc-port", "0", *options],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            cwd=root / "models",
        )
        try:
            rest_port, grpc_port = _ports(process, log)
            yield Target(process, rest_port, grpc_port, log)
        finally:
            process.terminate()
            try:
                status = process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                status = f"{process.wait()}, killed 30 s after it was asked to end"
            if status != 0:
                raise AssertionError(f"the server ended with exit status {status}")


def _ports(process: subprocess.Popen, log: Path) -> tuple[int, int]:
    """Waits for the banner and reads both ports off it."""
    deadline = time.monotonic() + _START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        text = log.read_text(encoding="utf-8", errors="replace")
        rest, grpc = re.search(r"REST +http://[^/]+:(\d+)/", text), re.search(r"gRPC +\S+:(\d+)\s", text)
        if rest and grpc:
            return int(rest[1]), int(grpc[1])
        time.sleep(0.05)
    raise AssertionError(f"the server did not start: {log.read_text(encoding='utf-8', errors='replace')[-3000:]}")
