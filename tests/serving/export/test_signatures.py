"""What each signature answers and refuses, of a small model of images, with heads of the clients' own."""

import dataclasses
import io

import grpc
import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from serving.errors import RequestError
from serving.export.signatures import signature_names
from serving.saved_model.servable import load_servable
from tff_pdp.models.dense import build_mlp

SHAPE = (4, 6, 3)
IDS = ["b", "", "a", "nobody"]
PERSONALIZED = [True, False, True, False]


@pytest.fixture(scope="module")
def images(exporter):
    def weights(seed):
        random = np.random.default_rng(seed)
        return {name: random.normal(size=array.shape).astype(np.float32) / 4 for name, array in model.init(0).items()}

    model = build_mlp(SHAPE, num_classes=3, hidden_units=(5,))
    return dataclasses.replace(
        exporter,
        model=model,
        global_weights=weights(0),
        personal_weights={"a": weights(1), "b": weights(2)},
        x=np.random.default_rng(3).random((4, *SHAPE), np.float32),
    )


@pytest.fixture(scope="module")
def servable(images, tmp_path_factory):
    return load_servable(images.export(tmp_path_factory.mktemp("images")))


def example(**features) -> bytes:
    return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()


def floats(values) -> tf.train.Feature:
    return tf.train.Feature(float_list=tf.train.FloatList(value=np.ravel(values)))


def strings(*values) -> tf.train.Feature:
    return tf.train.Feature(bytes_list=tf.train.BytesList(value=values))


def refuses(message):
    return pytest.raises(RequestError, match=message)


def test_names_are_of_what_the_model_takes_and_gives(exporter, images):
    assert signature_names(images.model) == ("serving_default", "predict", "predict_images", "classify")
    assert signature_names(exporter.model) == ("serving_default", "predict", "classify")
    regression = dataclasses.replace(exporter.model, num_classes=0)
    assert signature_names(regression) == ("serving_default", "predict", "regress")


def test_images_are_answered_like_their_pixels(images, servable):
    pixels = [Image.fromarray(one) for one in np.random.default_rng(4).integers(0, 256, (4, *SHAPE), np.uint8)]
    contents = []
    for number, image in enumerate(pixels):
        buffer = io.BytesIO()
        image.save(buffer, "PNG" if number % 2 == 0 else "JPEG", quality=95)
        contents.append(buffer.getvalue())
    answer = servable.predict(
        "predict_images", {"client_id": np.array(IDS, object), "image_bytes": np.array(contents, object)}
    )
    decoded = [np.asarray(Image.open(io.BytesIO(content)), np.float32) / 255 for content in contents]
    np.testing.assert_allclose(answer["probabilities"], images.expected(IDS, np.stack(decoded)), atol=images.rounding())
    np.testing.assert_array_equal(answer["personalized"], PERSONALIZED)


def test_examples_are_classified_with_or_without_a_client(images, servable):
    serialised = [
        example(x=floats(x), **({"client_id": strings(client_id.encode())} if client_id else {}))
        for client_id, x in zip(IDS, images.x, strict=True)
    ]
    answer = servable.on_examples("classify", "classify", np.array(serialised, object))
    assert set(answer) == {"classes", "scores"}
    assert answer["classes"].tolist() == [[b"0", b"1", b"2"]] * 4
    np.testing.assert_allclose(answer["scores"], images.expected(IDS, images.x), atol=images.rounding())


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (example(client_id=strings(b"a")), "Feature: x .* is required"),
        (example(x=floats(range(71))), "Key: x"),
        (example(x=floats([np.nan] * 72)), "x must be finite"),
        (example(x=strings(b"text")), "Key: x.*Data types don't match"),
        (example(x=floats(range(72)), client_id=strings(b"a", b"b")), "Key: client_id"),
        (b"no example", "Could not parse example input"),
    ],
    ids=["no x", "too short", "not finite", "strings", "two clients", "no example"],
)
def test_examples_that_do_not_fit_are_refused(servable, broken, message):
    with refuses(message) as caught:
        servable.on_examples("classify", "classify", np.array([example(x=floats(range(72))), broken], object))
    assert caught.value.code == grpc.StatusCode.INVALID_ARGUMENT


def test_every_signature_checks_what_it_gets(images, servable):
    with refuses("send one client id for each example") as caught:
        servable.predict("", {"client_id": np.array(["a"], object), "x": images.x})
    assert caught.value.code == grpc.StatusCode.INVALID_ARGUMENT
    with refuses("x must be finite"):
        servable.predict("predict", {"client_id": np.array(IDS, object), "x": images.x * np.inf})
    black = tf.io.encode_png(tf.zeros(SHAPE, tf.uint8)).numpy()
    with refuses("send one client id for each example"):
        servable.predict(
            "predict_images",
            {"client_id": np.array(IDS, object), "image_bytes": np.array([black], object)},
        )
    with refuses("must be PNG or JPEG images") as caught:
        servable.predict(
            "predict_images",
            {"client_id": np.array(["a", "b"], object), "image_bytes": np.array([black, b"GIF89a"], object)},
        )
    assert caught.value.code == grpc.StatusCode.INVALID_ARGUMENT
