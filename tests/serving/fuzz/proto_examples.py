"""Classification and regression of tf.Examples, and predictions of images, right and wrong."""

import random

import tensorflow as tf

# TensorFlow Serving's message classes are built at run time, where a type checker cannot see them.
# pyright: reportAttributeAccessIssue=false
from tensorflow_serving.apis import classification_pb2, predict_pb2

from tests.serving.fuzz.cases import MARKER, NUMERIC_MARKER, GrpcCase, Oracle, ServedModel
from tests.serving.fuzz.image_bytes import image_bytes
from tests.serving.fuzz.proto_messages import CLASSIFY, MESSAGES, PREDICT, REGRESS, example


def valid_examples(rng: random.Random, served: ServedModel) -> GrpcCase:
    request = classification_pb2.ClassificationRequest()
    request.model_spec.name, request.model_spec.signature_name = served.name, "classify"
    ids = [rng.choice([*served.answers, MARKER]) for _ in range(rng.randrange(1, 4))]
    rows = [rng.randrange(len(served.examples)) for _ in ids]
    request.input.example_list.examples.extend(
        example(served, *pair) for pair in zip(rows, map(str.encode, ids), strict=True)
    )
    message = request.SerializeToString(deterministic=True)
    return GrpcCase("valid examples", CLASSIFY, message, Oracle.ANSWERED, served.expected(ids, rows))


def examples(rng: random.Random, served: ServedModel) -> GrpcCase:
    """tf.Examples with wrong features, in a message that is right."""
    method = rng.choice([CLASSIFY, CLASSIFY, REGRESS])
    request = MESSAGES[method]()
    request.model_spec.name = served.name
    request.model_spec.signature_name = rng.choice(["classify"] * 6 + ["", "regress", "serving_default", "predict"])
    target = rng.choice([request.input.example_list, request.input.example_list_with_context])
    for _ in range(rng.choice([0, 1, 2, 50])):
        one = example(served, 0, MARKER.encode())
        features = one.features.feature
        for change in rng.sample(range(7), rng.randrange(3)):
            if change == 0:
                features.pop(rng.choice(["client_id", "x"]), None)
            elif change == 1:
                features["x"].float_list.value.extend([NUMERIC_MARKER] * rng.choice([1, 100]))
            elif change == 2:
                features["x"].int64_list.value.append(-(2**63))
            elif change == 3:
                features["x"].float_list.value[:] = [float("nan")] * 16
            elif change == 4:
                features["client_id"].bytes_list.value.append(b"\xff\n" * rng.choice([1, 10_000]))
            elif change == 5:
                features[MARKER].bytes_list.value.append(b"")
            else:
                features["client_id"].float_list.value.append(1.0)
        target.examples.append(one)
    return GrpcCase("examples", method, request.SerializeToString(deterministic=True))


def serialized_examples(rng: random.Random, served: ServedModel) -> GrpcCase:
    """Strings that should be tf.Examples, given straight to the signature that parses them."""
    content = bytearray(example(served, 0, MARKER.encode()).SerializeToString(deterministic=True))
    for _ in range(rng.choice([1, 3, 10])):
        content[rng.randrange(len(content))] = rng.randrange(256)
    del content[rng.choice([len(content), rng.randrange(len(content))]) :]
    request = predict_pb2.PredictRequest()
    request.model_spec.name = served.name
    request.model_spec.signature_name = rng.choice(["classify", "regress"])
    request.inputs["examples"].CopyFrom(tf.make_tensor_proto([bytes(content)] * rng.choice([1, 3]), tf.string))
    return GrpcCase("serialised examples", PREDICT, request.SerializeToString(deterministic=True))


def images(rng: random.Random, served: ServedModel) -> GrpcCase:
    request = predict_pb2.PredictRequest()
    request.model_spec.name = served.name
    request.model_spec.signature_name = "predict_images"
    images = [image_bytes(rng) for _ in range(rng.choice([1, 1, 2, 4]))]
    request.inputs["client_id"].CopyFrom(tf.make_tensor_proto([MARKER] * len(images), tf.string))
    request.inputs["image_bytes"].CopyFrom(tf.make_tensor_proto(images, tf.string))
    return GrpcCase("images", PREDICT, request.SerializeToString(deterministic=True))
