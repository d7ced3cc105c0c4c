"""The codec of examples against TensorFlow's own messages, and on bytes that nobody should read."""

import numpy as np
import pytest

from tests.data.written_clients import as_stored
from tff_pdp.data import example_codec, tfrecord
from tff_pdp.data.example_codec import decode_examples, encode_examples, record_extents, record_lengths
from tff_pdp.data.manifest import FeatureSpec
from tff_pdp.errors import DataError

# Sizes of varints change at 128 and at 16,384, those of lengths around the values at shapes between.
CLASSES = np.array([0, 1, 127, 128, 300, 16383, 16384, 2**40, 2**63 - 1, -1, 5])
VALUES = np.array([0.0, -1.5, np.inf, -np.inf, np.nan, 1e-40, 3.4e38, 0.1, -0.0, 7.0, 2.0], np.float32)
SHAPES = [(1,), (14,), (17,), (8, 8, 1), (4076,), (28, 28), (0,), ()]
KINDS = [(10, "float32"), (10, "uint8"), (0, "float32"), (0, "uint8")]


def examples(features, seed=0):
    """As many as there are labels above, with any bits in their values."""
    random = np.random.default_rng(seed)
    x = random.integers(0, 256, (len(CLASSES), int(np.prod(features.shape)) * np.dtype(features.x_dtype).itemsize))
    ids = np.array([random.bytes(16).hex().encode() for _ in CLASSES], "S32")
    return x.astype(np.uint8).view(features.x_dtype), CLASSES if features.num_classes else VALUES, ids


def tensorflow_records(features, x, y, ids):
    import tensorflow as tf

    for values, label, example_id in zip(x, y, ids, strict=True):
        if features.x_dtype == "uint8":
            stored = tf.train.Feature(bytes_list=tf.train.BytesList(value=[values.tobytes()]))
        else:
            # Python floats would lose the payload of a NaN; on the wire, packed floats are the bytes of one string.
            packed = tf.train.BytesList(value=[values.tobytes()] if values.size else []).SerializeToString()
            stored = tf.train.Feature(float_list=tf.train.FloatList.FromString(packed))
        if features.num_classes:
            label_feature = tf.train.Feature(int64_list=tf.train.Int64List(value=[label]))
        else:
            label_feature = tf.train.Feature(float_list=tf.train.FloatList(value=[label]))
        id_feature = tf.train.Feature(bytes_list=tf.train.BytesList(value=[example_id]))
        feature = {"x": stored, "y": label_feature, "example_id": id_feature}
        message = tf.train.Example(features=tf.train.Features(feature=feature))
        yield tfrecord.frame(message.SerializeToString(deterministic=True))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("num_classes", "x_dtype"), KINDS)
@pytest.mark.parametrize("part_bytes", [1, example_codec._PART_BYTES])
def test_bytes_are_tensorflows_and_decode_to_the_same(monkeypatch, shape, num_classes, x_dtype, part_bytes):
    monkeypatch.setattr(example_codec, "_PART_BYTES", part_bytes)
    features = FeatureSpec.of(shape, num_classes, x_dtype)
    x, y, ids = examples(features)
    expected = list(tensorflow_records(features, x, y, ids))

    encoded = encode_examples(features, x, y, ids)
    assert encoded == b"".join(expected)
    assert record_lengths(features, y).tolist() == [len(record) for record in expected]

    decoded_x, decoded_y = decode_examples(features, encoded, "shard")
    stored_x = as_stored(features, decoded_x)
    assert stored_x.shape == (len(y), *shape) and stored_x.dtype == x_dtype
    assert stored_x.tobytes() == x.tobytes() and decoded_y.tobytes() == y.tobytes() and decoded_y.dtype == y.dtype


@pytest.mark.parametrize("label", [3, 300])
def test_records_of_one_length(label):
    features = FeatureSpec.of((3,), 1000)
    x, _, ids = examples(features)
    y = np.full(len(x), label)
    encoded = encode_examples(features, x, y, ids)
    assert encoded == b"".join(tensorflow_records(features, x, y, ids))
    decoded_x, decoded_y = decode_examples(features, encoded, "shard")
    assert decoded_x.tobytes() == x.tobytes() and decoded_y.tolist() == [label] * len(x)
    starts, lengths = record_extents(features, encoded, "shard")
    assert lengths.tolist() == record_lengths(features, y).tolist() and starts.tolist() == [
        number * lengths[0] for number in range(len(x))
    ]


@pytest.mark.parametrize(("num_classes", "x_dtype"), KINDS)
def test_no_examples(num_classes, x_dtype):
    features = FeatureSpec.of((2, 3), num_classes, x_dtype)
    x, y, ids = examples(features)
    assert encode_examples(features, x[:0], y[:0], ids[:0]) == b""
    assert record_lengths(features, y[:0]).shape == (0,)
    decoded_x, decoded_y = decode_examples(features, b"", "shard")
    assert decoded_x.shape == (0, 2, 3) and decoded_x.dtype == np.float32
    assert decoded_y.shape == (0,) and decoded_y.dtype == y.dtype


def test_bytes_become_fractions_of_255():
    features = FeatureSpec.of((256,), 2, "uint8")
    pixels = np.arange(256, dtype=np.uint8)[np.newaxis]
    encoded = encode_examples(features, pixels, np.array([1]), np.array([b"0" * 32]))
    x, _ = decode_examples(features, encoded, "shard")
    assert x.dtype == np.float32 and x[0].tolist() == [float(np.float32(value / 255)) for value in range(256)]


def test_arrays_in_any_memory_order():
    features = FeatureSpec.of((3,), 10)
    x, _, ids = examples(features)
    y = np.arange(len(x))
    backwards = encode_examples(features, np.asfortranarray(x)[::-1], y[::-1], ids[::-1])
    assert backwards == encode_examples(features, x[::-1].copy(), y[::-1].copy(), ids[::-1].copy())


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"x": np.zeros((2, 3))}, r"x must be float32 \[2, 3\], not float64 \[2, 3\]"),
        ({"x": np.zeros((2, 4), np.float32)}, r"not float32 \[2, 4\]"),
        ({"y": np.zeros(2, np.float32)}, r"y must be int64 \[2\], not float32"),
        ({"example_ids": np.array([b"short"] * 2)}, r"example_ids must be S32 \[2\], not \|S5"),
    ],
)
def test_other_arrays_are_refused(wrong, message):
    right = {"x": np.zeros((2, 3), np.float32), "y": np.zeros(2, np.int64), "example_ids": np.array([b"0" * 32] * 2)}
    with pytest.raises(ValueError, match=message):
        encode_examples(FeatureSpec.of((3,), 10), **{**right, **wrong})


@pytest.mark.parametrize("labels", ["of one size", "of several sizes"])
def test_every_damaged_byte_is_found(labels):
    features = FeatureSpec.of((2,), 1000)
    x, _, ids = examples(features)
    y = np.array([1, 2, 3 if labels == "of one size" else 300])
    encoded = encode_examples(features, x[:3], y, ids[:3])
    starts = np.cumsum(record_lengths(features, y)) - record_lengths(features, y)
    for position in range(len(encoded)):
        damaged = bytearray(encoded)
        damaged[position] ^= 4
        record = starts[starts <= position][-1]
        with pytest.raises(DataError, match=rf"^shard: corrupt TFRecord at byte {1000 + record};"):
            decode_examples(features, bytes(damaged), "shard", 1000)
    for stop in set(range(len(encoded))) - set(starts.tolist()):
        record = starts[starts < stop][-1]
        with pytest.raises(DataError, match=rf"^shard: corrupt TFRecord at byte {1000 + record};"):
            decode_examples(features, encoded[:stop], "shard", 1000)


def test_sound_records_of_another_layout():
    features = FeatureSpec.of((2,), 1000)
    x, _, ids = examples(features)
    ours = encode_examples(features, x[:1], CLASSES[:1], ids[:1])
    payload = tfrecord.unframe(ours, "shard")[0]
    other_shape = encode_examples(FeatureSpec.of((3,), 1000), np.zeros((1, 3), np.float32), CLASSES[:1], ids[:1])
    others = {
        "other shape": other_shape,
        "other feature name": tfrecord.frame(payload.replace(b"\n\x01x", b"\n\x01z")),
        "varint that does not end": tfrecord.frame(payload[:-1] + b"\x80"),
        "no message": tfrecord.frame(b"hello"),
    }
    for foreign in others.values():
        with pytest.raises(DataError, match=rf"^shard: the record at byte {70 + len(ours)} is not laid out"):
            decode_examples(features, ours + foreign + ours, "shard", 70)
