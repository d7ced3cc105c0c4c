import gc
import shutil
import weakref

import grpc
import numpy as np
import pytest
import tensorflow as tf

from serving.errors import RequestError
from serving.saved_model import layout
from serving.saved_model.servable import Servable, load_servable
from tff_pdp.errors import ServingError


class Toy(tf.Module):
    """`y = 2 x`, and on examples that are decimal numbers: classes, values, and outputs of wrong forms."""

    def __init__(self):
        super().__init__()
        self.factor = tf.Variable(tf.constant(2.0))

    def double(self, x, name):
        tf.debugging.assert_all_finite(x, "x must be finite")
        return {"y": self.factor * x, "named": tf.strings.join([name, "!"])}

    def classify(self, inputs):
        scores = tf.strings.to_number(inputs)[:, tf.newaxis] * tf.constant([[1.0, -1.0]])
        classes = tf.repeat(tf.constant([["plus", "minus"]]), tf.size(inputs), axis=0)
        return {"classes": classes, "scores": scores}

    def regress(self, inputs):
        return {"outputs": self.factor * tf.strings.to_number(inputs)}


@pytest.fixture(scope="module")
def servable(tmp_path_factory):
    folder = tmp_path_factory.mktemp("toy")
    toy = Toy()
    examples = tf.TensorSpec([None], tf.string, name="inputs")

    def graph(function, *specs):
        return tf.function(function).get_concrete_function(*specs)

    predict = graph(
        toy.double, tf.TensorSpec([None, 3], tf.float32, name="x"), tf.TensorSpec([None], tf.string, name="name")
    )
    classify, regress = graph(toy.classify, examples), graph(toy.regress, examples)
    wrong = {
        "flat_scores": lambda inputs: {"scores": tf.strings.to_number(inputs)},
        "integer_scores": lambda inputs: {"scores": tf.ones([tf.size(inputs), 2], tf.int32)},
        "float_classes": lambda inputs: {"classes": tf.ones([tf.size(inputs), 2])},
        "one_row": lambda inputs: {"scores": tf.ones([1, 2]) * tf.strings.to_number(inputs[0])},
        "uneven": lambda inputs: {
            "classes": tf.fill([tf.size(inputs), 3], "c"),
            "scores": tf.ones([tf.size(inputs), 2]),
        },
        "other_output": lambda inputs: {"logits": tf.strings.to_number(inputs)},
        "three_outputs": lambda inputs: {key: tf.strings.to_number(inputs) for key in ("classes", "scores", "more")},
        "wide_values": lambda inputs: {"outputs": tf.ones([tf.size(inputs), 2])},
        "integer_values": lambda inputs: {"outputs": tf.ones([tf.size(inputs)], tf.int32)},
        "one_value": lambda inputs: {"outputs": tf.ones([1]) * tf.strings.to_number(inputs[0])},
        "fixed": lambda inputs: {"outputs": tf.strings.to_number(inputs), "names": tf.constant(["a", "b"])},
        "scalar": lambda inputs: {"outputs": tf.reduce_sum(tf.strings.to_number(inputs))},
        "column": lambda inputs: {"outputs": tf.strings.to_number(inputs)[:, tf.newaxis]},
    }
    other_key = graph(lambda examples: toy.regress(examples), tf.TensorSpec([None], tf.string, name="examples"))
    tf.saved_model.save(
        toy,
        str(folder),
        signatures={
            "serving_default": predict,
            "classify": classify,
            "regress": regress,
            "other_key": other_key,
            **{name: graph(function, examples) for name, function in wrong.items()},
        },
    )
    return Servable(folder)


def arrays(n=2):
    return {"x": np.arange(n * 3, dtype=np.float32).reshape(n, 3), "name": np.array([b"a"] * n, object)}


def examples(*values):
    return np.array([str(value).encode() for value in values], object)


def refusal(call):
    with pytest.raises(RequestError) as refused:
        call()
    return refused.value.code, refused.value.message


def test_predict_returns_outputs_by_key_and_filters_them(servable):
    outputs = servable.predict("", arrays())
    assert sorted(outputs) == ["named", "y"]
    np.testing.assert_array_equal(outputs["y"], [[0, 2, 4], [6, 8, 10]])
    assert outputs["named"].tolist() == [b"a!", b"a!"]
    assert list(servable.predict("serving_default", arrays(), ["y"])) == ["y"]
    assert list(servable.predict("", arrays(), ["y", "named"])) == ["y", "named"]


@pytest.mark.parametrize(
    "names", [np.array([b"a", b"b"]), np.array(["a", "b"]), np.array(["a", "b"], object)], ids=["S", "U", "O"]
)
def test_every_numpy_form_of_a_string_is_accepted(servable, names):
    assert servable.predict("", {**arrays(), "name": names}, ["named"])["named"].tolist() == [b"a!", b"b!"]


@pytest.mark.parametrize(
    ("changes", "output_filter", "message"),
    [
        (
            {"x": None},
            [],
            "input size does not match signature: 1!=2 len({name}) != len({name,x}). Sent extra: {}. "
            "Missing but required: {x}.",
        ),
        (
            {"z": np.ones(1)},
            [],
            "input size does not match signature: 3!=2 len({name,x,z}) != len({name,x}). Sent extra: {z}. "
            "Missing but required: {}.",
        ),
        (
            {"x": None, "z": np.ones(1)},
            [],
            "input tensor alias not found in signature: z. Inputs expected to be in the set {name,x}.",
        ),
        ({"x": np.ones((2, 3))}, [], "Expects arg[x] to be float32 but float64 is provided"),
        ({"x": np.array([b"a"])}, [], "Expects arg[x] to be float32 but string is provided"),
        ({"name": np.ones(2)}, [], "Expects arg[name] to be string but float64 is provided"),
        ({"x": np.ones(2, "datetime64[s]")}, [], "Expects arg[x] to be float32 but datetime64[s] is provided"),
        ({"x": np.ones((2, 4), np.float32)}, [], "input x has shape [2, 4], but the signature has (None, 3)"),
        ({"x": np.ones(3, np.float32)}, [], "input x has shape [3], but the signature has (None, 3)"),
        ({"x": np.float32(1)}, [], "input x has shape [], but the signature has (None, 3)"),
        (
            {},
            ["z"],
            "output tensor alias not found in signature: z Outputs expected to be in the set {named,y}.",
        ),
        ({}, ["y", "named", "y"], "duplicate output tensor alias: y"),
    ],
)
def test_wrong_tensors_are_refused_with_the_message_of_tensorflow_serving(servable, changes, output_filter, message):
    inputs = {key: value for key, value in {**arrays(), **changes}.items() if value is not None}
    expected = (grpc.StatusCode.INVALID_ARGUMENT, message)
    assert refusal(lambda: servable.predict("", inputs, output_filter)) == expected


def test_an_op_that_fails_refuses_the_request_with_its_message(servable):
    inputs = {**arrays(), "x": np.full((2, 3), np.nan, np.float32)}
    code, message = refusal(lambda: servable.predict("", inputs))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert message.startswith("x must be finite")


def test_only_signatures_whose_tensors_all_begin_with_the_examples_are_batchable(servable):
    assert servable.signature("").is_batchable
    # A shape of its own, or one that is fixed, is not divided among requests.
    assert not servable.signature("fixed").is_batchable
    assert not servable.signature("scalar").is_batchable


def test_unknown_signatures_are_refused_differently_by_predict_and_classify(servable):
    expected = (grpc.StatusCode.FAILED_PRECONDITION, 'Serving signature key "s" not found.')
    assert refusal(lambda: servable.predict("s", arrays())) == expected
    expected = (grpc.StatusCode.INVALID_ARGUMENT, "No signature was found with the name: s")
    assert refusal(lambda: servable.on_examples("classify", "s", examples(1))) == expected
    assert refusal(lambda: servable.on_examples("regress", "s", examples(1))) == expected


def test_classify_returns_classes_and_scores(servable):
    outputs = servable.on_examples("classify", "classify", examples(2, -3))
    assert outputs["classes"].tolist() == [[b"plus", b"minus"]] * 2
    np.testing.assert_array_equal(outputs["scores"], [[2, -2], [-3, 3]])


def test_regress_returns_values(servable):
    np.testing.assert_array_equal(servable.on_examples("regress", "regress", examples(2, -3))["outputs"], [4, -6])
    np.testing.assert_array_equal(servable.on_examples("regress", "column", examples(2, -3))["outputs"], [[2], [-3]])


@pytest.mark.parametrize(
    ("method", "name", "values", "message"),
    [
        ("classify", "classify", [], "Input is empty."),
        ("regress", "regress", [], "Input is empty."),
        ("classify", "", [1], "Expected one input Tensor."),
        ("regress", "", [1], "Expected one input Tensor."),
        ("classify", "three_outputs", [1], "Expected one or two output Tensors, found 3"),
        ("regress", "classify", [1], "Expected one output Tensor."),
        ("regress", "other_key", [1], "No regression inputs found in SignatureDef: inputs"),
        ("classify", "other_key", [1], "No classification inputs found in SignatureDef: inputs"),
        ("regress", "other_output", [1], "No regression outputs found in SignatureDef: inputs"),
        (
            "classify",
            "other_output",
            [1],
            'Expected classification signature outputs to contain at least one of "classes" or "scores". Signature',
        ),
        ("classify", "flat_scores", [1, 2], "Expected Tensor shape: [batch_size num_classes] but got [2]"),
        ("classify", "integer_scores", [1], "Expected scores Tensor of DT_FLOAT. Got: DT_INT32"),
        ("classify", "float_classes", [1], "Expected classes Tensor of DT_STRING. Got: DT_FLOAT"),
        ("classify", "one_row", [1, 2], "Expected scores output batch size of 2. Got: 1"),
        ("classify", "uneven", [1], "Tensors class and score should match in dim_size(1). Got 3 vs. 2"),
        (
            "regress",
            "wide_values",
            [1],
            "Expected output Tensor shape to be either [batch_size] or [batch_size, 1] but got [1,2]",
        ),
        ("regress", "one_value", [1, 2], "Input batch size did not match output batch size: 2 vs. 1"),
        ("regress", "integer_values", [1], "Expected output Tensor of DT_FLOAT.  Got: DT_INT32"),
    ],
)
def test_signatures_that_cannot_classify_or_regress_are_refused(servable, method, name, values, message):
    code, found = refusal(lambda: servable.on_examples(method, name, examples(*values)))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert found.startswith(message)


def test_an_export_is_loaded_and_frees_its_session_when_closed(export_dir, exporter):
    servable = load_servable(export_dir)
    outputs = servable.predict("", {"client_id": np.array(["alice"] * 6, object), "x": exporter.x})
    (answers,) = [array for array in outputs.values() if array.dtype == np.float32]
    np.testing.assert_allclose(answers, exporter.expected(["alice"] * 6, exporter.x), atol=exporter.rounding())
    session = weakref.ref(servable._session)
    # Not left to the garbage collector, which may come much later.
    gc.disable()
    try:
        servable.close()
        assert session() is None
    finally:
        gc.enable()


def test_an_export_that_does_not_load_is_one_clear_error(export_dir, tmp_path):
    with pytest.raises(ServingError):
        load_servable(tmp_path / "missing")
    shutil.copytree(export_dir, tmp_path / "1")
    (tmp_path / "1" / layout.SAVED_MODEL_FILE).write_bytes(b"garbage")
    with pytest.raises(ServingError, match=r"saved_model\.pb"):
        load_servable(tmp_path / "1")
