import numpy as np
import pytest
import tensorflow as tf

# TensorFlow Serving's message classes are built at run time, where a type checker cannot see them.
# pyright: reportAttributeAccessIssue=false
from tensorflow_serving.apis import prediction_log_pb2

from serving.saved_model import layout, warmup
from tff_pdp.errors import ServingError


@pytest.fixture
def folder(tmp_path):
    (tmp_path / layout.EXTRA_DIRECTORY).mkdir()
    return tmp_path


def write(folder, *logs):
    with tf.io.TFRecordWriter(str(folder / layout.WARMUP_FILE)) as writer:
        for log in logs:
            writer.write(log.SerializeToString())


def parsed(serialised):
    return [tf.train.Example.FromString(one) for one in serialised]


def test_every_signature_is_warmed_up_for_known_and_unknown_clients(folder):
    names = ("serving_default", "predict_images", "classify")
    warmup.write_requests(folder, "m", names, ["a", "b"], (2, 3, 1))
    requests = list(warmup.read_requests(folder))
    assert [(request.method, request.signature_name) for request in requests] == [
        *[("predict", "serving_default")] * 2,
        *[("predict", "predict_images")] * 2,
        *[("classify", "classify")] * 2,
    ]
    ids = [b"", b"a", b"b", b"", b"a", b"b", b"", b"a"]
    assert requests[0].inputs["client_id"].tolist() == [b""]
    assert requests[1].inputs["client_id"].tolist() == ids
    np.testing.assert_array_equal(requests[1].inputs["x"], np.zeros((8, 2, 3, 1), np.float32))
    images = [tf.io.decode_image(one).numpy() for one in requests[3].inputs["image_bytes"]]
    np.testing.assert_array_equal(images, np.zeros((8, 2, 3, 1)))
    assert {one[:4] for one in requests[3].inputs["image_bytes"]} == {b"\x89PNG", b"\xff\xd8\xff\xe0"}
    examples = parsed(requests[5].inputs["inputs"])
    assert [one.features.feature["client_id"].bytes_list.value[0] for one in examples] == ids
    assert examples[0].features.feature["x"].float_list.value == [0.0] * 6


def test_a_context_is_part_of_every_example(folder):
    log = prediction_log_pb2.PredictionLog()
    message = log.regress_log.request.input.example_list_with_context
    message.context.CopyFrom(warmup.example("of the context", np.zeros(1)))
    message.examples.add().features.feature["x"].float_list.value.append(1.0)
    message.examples.add().CopyFrom(warmup.example("own", np.array([2.0])))
    write(folder, log)
    (request,) = warmup.read_requests(folder)
    assert request.method == "regress"
    read = [(e.features.feature["client_id"], e.features.feature["x"]) for e in parsed(request.inputs["inputs"])]
    assert [client.bytes_list.value[0] for client, _ in read] == [b"of the context", b"own"]
    assert [x.float_list.value[0] for _, x in read] == [1.0, 2.0]


def test_no_file_is_no_requests(folder):
    assert list(warmup.read_requests(folder)) == []


def test_other_and_too_many_records_are_refused(folder):
    other = prediction_log_pb2.PredictionLog()
    other.session_run_log.SetInParent()
    write(folder, other)
    with pytest.raises(ServingError, match="record 0 is session_run_log, not a predict, classify or regress log"):
        list(warmup.read_requests(folder))
    log = prediction_log_pb2.PredictionLog()
    log.predict_log.SetInParent()
    write(folder, *[log] * 1001)
    with pytest.raises(ServingError, match="holds 1001 records; servers take at most 1000"):
        list(warmup.read_requests(folder))
