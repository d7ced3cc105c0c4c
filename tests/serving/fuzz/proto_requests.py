"""Messages for the gRPC port: valid ones with one thing broken, bytes that are no message, and HTTP/2 that is none."""

import random
from collections.abc import Callable
from typing import Any

import tensorflow as tf

# TensorFlow Serving's message classes are built at run time, where a type checker cannot see them.
# pyright: reportAttributeAccessIssue=false
from tensorflow_serving.apis import (
    model_management_pb2,
)

from tests.serving.fuzz.cases import MARKER, Case, GrpcCase, HttpCase, Oracle, ServedModel
from tests.serving.fuzz.proto_examples import examples, images, serialized_examples, valid_examples
from tests.serving.fuzz.proto_messages import (
    CLASSIFY,
    MESSAGES,
    METADATA,
    MULTI,
    PREDICT,
    PREDICTION,
    REGRESS,
    RELOAD,
    STATUS,
    decodable,
    example,
    predict_request,
    valid_predict,
)
from tests.serving.fuzz.proto_tensors import splat, tensor

# One that succeeds replaces what is served, so reloads are only mutated where they stay wrong.
_SAFE_METHODS = [method for method in MESSAGES if method != RELOAD]
_NAMES = [
    "é" * 100_000,
    "",
    "other",
    "../../etc/passwd",
    "/etc/passwd",
    "\0",
    "toy\n",
    "a" * 100_000,
    "é",
    "..",
    "%2e%2e",
    MARKER,
]
_NUMBERS = [0, -1, 2, 7, 2**31, 2**63 - 1, -(2**63)]
_UNKNOWN_METHODS = [
    f"{PREDICTION}/Explode",
    f"{PREDICTION}/predict",
    "/tensorflow.serving.SessionService/SessionRun",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    "/" + "a" * 5_000,
    f"/..{PREDICT}",
    "/x/y",
    "/",
    MULTI,
]


def generate(rng: random.Random, served: ServedModel) -> Case:
    """Makes one case."""
    make = rng.choices([make for make, _ in _GENERATORS], [weight for _, weight in _GENERATORS])[0]
    return make(rng, served)


def _valid(rng: random.Random, served: ServedModel, method: str) -> Any:
    if method == PREDICT:
        return valid_predict(rng, served)[0]
    request = MESSAGES[method]()
    if method in (CLASSIFY, REGRESS, MULTI):
        if method != MULTI:
            request.model_spec.name = served.name
        for _ in range(rng.randrange(1, 4)):
            request.input.example_list.examples.append(example(served, 0, MARKER.encode()))
    else:
        request.model_spec.name = served.name
    if method == METADATA:
        request.metadata_field.append("signature_def")
    return request


def _random_bytes(rng: random.Random, served: ServedModel) -> GrpcCase:
    message = bytes(rng.randrange(256) for _ in range(rng.choice([1, 5, 20, 100, 1000])))
    return GrpcCase("random bytes", rng.choice(_SAFE_METHODS), message)


def _bytes_mutated(rng: random.Random, served: ServedModel) -> GrpcCase:
    """Where the bytes are no message any more, gRPC refuses them; most are drawn again until they are one."""
    method = rng.choice([PREDICT, PREDICT, *_SAFE_METHODS])
    original = _valid(rng, served, method).SerializeToString(deterministic=True)
    message = _mutated(rng, original)
    if rng.random() < 0.9:
        for _ in range(30):
            if message != original and decodable(method, message):
                break
            message = _mutated(rng, original)
    return GrpcCase("bytes mutated", method, message)


def _mutated(rng: random.Random, original: bytes) -> bytes:
    message = bytearray(original)
    for _ in range(rng.choice([0, 1, 1, 2, 5])):
        message[rng.randrange(len(message))] = rng.randrange(256)
    if rng.random() < 0.2:
        place = rng.randrange(len(message))
        message[place : place + rng.choice([0, 1, 4])] = bytes([rng.randrange(256)]) * rng.choice([0, 1, 3])
    if rng.random() < 0.2:
        del message[rng.randrange(len(message) + 1) :]
    return bytes(message)


def _ids(rng: random.Random, served: ServedModel) -> GrpcCase:
    """An id nobody knows is no error, whatever bytes it has."""
    rows = [rng.randrange(len(served.examples))]
    short = [
        b"\xff\xfe",
        b"\0",
        b"alice\0",
        b"alice\n",
        b"alice ",
        b" ",
        b"\n",
        b"../alice",
        b"%s",
        b"ALICE",
        b"<global>",
    ]
    one = rng.choice([*short, MARKER.encode() + b"\n", b"i" * (1 << 20), rng.randbytes(40), "\u202ealice".encode()])
    message = predict_request(served, [one], rows).SerializeToString(deterministic=True)
    return GrpcCase("ids", PREDICT, message, Oracle.ANSWERED, served.expected([one], rows))


def _valid_call(rng: random.Random, served: ServedModel) -> GrpcCase:
    request, expected = valid_predict(rng, served)
    message = request.SerializeToString(deterministic=True)
    compressed, metadata = rng.random() < 0.3, [("x-trace-bin", b"\xff\0"), ("x", "y")]
    return GrpcCase("valid", PREDICT, message, Oracle.ANSWERED, expected, metadata, compressed=compressed)


def _model_spec(rng: random.Random, served: ServedModel) -> GrpcCase:
    method = rng.choice([PREDICT, CLASSIFY, REGRESS, METADATA, STATUS])
    request = _valid(rng, served, method)
    spec = request.model_spec
    kind = rng.randrange(5)
    oracle = Oracle.REFUSED
    if kind == 0:
        spec.name = rng.choice([*_NAMES, *served.canary_names])
    elif kind == 1:
        spec.version.value = rng.choice(_NUMBERS)
    elif kind == 2:
        spec.version_label = rng.choice([name for name in _NAMES if name])
        # TensorFlow Serving does not look at labels when it is asked for states.
        oracle = Oracle.ODD if method == STATUS else oracle
    elif kind == 3 and method in (PREDICT, CLASSIFY, REGRESS):
        spec.signature_name = rng.choice([name for name in _NAMES if name] + ["__saved_model_init_op"])
    else:
        request.ClearField("model_spec")
    return GrpcCase("model spec", method, request.SerializeToString(deterministic=True), oracle)


def _filters(rng: random.Random, served: ServedModel) -> GrpcCase:
    method = rng.choice([PREDICT, METADATA])
    request = _valid(rng, served, method)
    if method == PREDICT:
        request.output_filter.extend(
            rng.choice([[MARKER], ["probabilities"] * 2, ["x"] * 10_000, ["", ""], ["a" * 10**5]])
        )
    else:
        request.metadata_field.extend(rng.choice([["x"], [""], ["signature_def", MARKER], ["a" * 10**5]]))
    return GrpcCase("filters", method, request.SerializeToString(deterministic=True), Oracle.REFUSED)


def _inputs(rng: random.Random, served: ServedModel) -> GrpcCase:
    """Missing, extra, and very many inputs."""
    request, _ = valid_predict(rng, served)
    if rng.random() < 0.5:
        del request.inputs[rng.choice(["client_id", "x"])]
    else:
        for i in range(rng.choice([1, 2, 5_000])):
            request.inputs[f"{MARKER}{i}"].CopyFrom(tf.make_tensor_proto(1.0))
    return GrpcCase("inputs", PREDICT, request.SerializeToString(deterministic=True), Oracle.REFUSED)


def _unknown_methods(rng: random.Random, served: ServedModel) -> GrpcCase:
    method = rng.choice(_UNKNOWN_METHODS)
    return GrpcCase("unknown methods", method, rng.randbytes(rng.randrange(50)), Oracle.REFUSED)


def _metadata(rng: random.Random, served: ServedModel) -> GrpcCase:
    request, expected = valid_predict(rng, served)
    pairs: list[tuple[str, str | bytes]] = rng.choice(
        [
            [("x", "a" * size) for size in (100, 1_000, 5_000)],
            [("x", "a" * 20_000)],
            [(f"x{i}", "y") for i in range(1_000)],
            [("authorization", "Bearer " + "x" * 500)],
            [("y-bin", bytes(range(256)))],
            [("grpc-timeout-x", "1H"), ("user-agent", "z"), ("content-language", "")],
        ]
    )
    message = request.SerializeToString(deterministic=True)
    return GrpcCase("metadata", PREDICT, message, Oracle.ODD, expected, pairs)


def _deadline(rng: random.Random, served: ServedModel) -> GrpcCase:
    request, expected = valid_predict(rng, served)
    seconds = rng.choice([0.0, 0.0001, 0.001, 0.002, 0.005])
    message = request.SerializeToString(deterministic=True)
    return GrpcCase("deadline", PREDICT, message, Oracle.ODD, expected, deadline_seconds=seconds)


def _reload(rng: random.Random, served: ServedModel) -> GrpcCase:
    """Configurations that are refused as a whole: each names one model that cannot be served."""
    request = model_management_pb2.ReloadConfigRequest()
    configs = request.config.model_config_list.config
    for i in range(rng.choice([0, 0, 0, 3_000])):
        configs.add(name=f"m{i}", base_path="/etc", model_platform="tensorflow")
    wrong = rng.randrange(8)
    if wrong == 0:
        configs.add(
            name="relative", base_path=rng.choice(["..", "../..", "etc", "", "./x"]), model_platform="tensorflow"
        )
    elif wrong == 1:
        for _ in range(2):
            configs.add(name=served.name, base_path="/etc", model_platform="tensorflow")
    elif wrong == 2:
        configs.add(name=rng.choice(["no_platform", "", "../x", MARKER * 1_000]), base_path="/etc")
    elif wrong == 3:
        request.Clear()
        request.config.custom_model_config.type_url = MARKER
    elif wrong == 4:
        request.Clear()
    elif wrong == 5:
        paths = ["/etc", "/", "//etc", "/etc/../etc", "/\0", "/" + "a" * 5_000, "/proc/self/root/etc", "/dev/zero"]
        outside = [name for name in served.canary_names if name.startswith("/")]
        configs.add(name=served.name, base_path=rng.choice([*paths, *outside]), model_platform="tensorflow")
    elif wrong == 6:
        model = configs.add(name=served.name, base_path="/etc", model_platform="tensorflow")
        model.model_version_policy.specific.versions.extend([-1, 2**63 - 1])
        model.version_labels[MARKER] = -(2**63)
    else:
        configs.add(name=served.name, base_path="gs://bucket/x", model_platform=rng.choice(["tensorflow", MARKER]))
    return GrpcCase("reload", RELOAD, request.SerializeToString(deterministic=True), Oracle.REFUSED)


def _too_large(rng: random.Random, served: ServedModel) -> GrpcCase:
    """70 MiB of zeros that travel as 70 kB, above the limit of the server."""
    return GrpcCase("too large", PREDICT, bytes(70 * 2**20), Oracle.REFUSED, compressed=True)


def _frames(rng: random.Random, served: ServedModel) -> HttpCase:
    """HTTP/2 that is none, and other protocols."""
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    settings = b"\0\0\0\4\0\0\0\0\0"
    noise = bytes(rng.randrange(256) for _ in range(rng.choice([1, 9, 50, 500])))
    sent = rng.choice(
        [
            noise,
            preface + noise,
            preface + settings + noise,
            preface + settings * 2_000,
            preface + settings + b"\0\0\x08\6\0\0\0\0\0" + b"p" * 8,
            preface + settings + b"\xff\xff\xff\1\4\0\0\0\1",
            preface + settings + b"\0\0\4\3\0\0\0\0\1\0\0\0\x08" * 500,
            preface[: rng.randrange(len(preface))],
            b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + noise,
        ]
    )
    return HttpCase("frames", [sent], half_close=True, abandon=rng.random() < 0.3, to_grpc_port=True)


_GENERATORS: list[tuple[Callable[[random.Random, ServedModel], Case], float]] = [
    (_random_bytes, 6),
    (_bytes_mutated, 25),
    (tensor, 25),
    (splat, 3),
    (_ids, 4),
    (_valid_call, 3),
    (valid_examples, 1),
    (_model_spec, 10),
    (_filters, 3),
    (_inputs, 3),
    (examples, 10),
    (serialized_examples, 5),
    (images, 5),
    (_unknown_methods, 3),
    (_metadata, 2),
    (_deadline, 2),
    (_reload, 2),
    (_too_large, 0.02),
    (_frames, 4),
]
