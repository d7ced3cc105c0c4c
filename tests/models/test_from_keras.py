"""Keras models as pure functions: equal to Keras's own calls, by themselves, and refused where examples would mix."""

import numpy as np
import pytest
import tensorflow as tf

from tff_pdp import testing
from tff_pdp.errors import ConfigError
from tff_pdp.models import from_keras
from tff_pdp.models.dropout import RowDraws
from tff_pdp.models.independence import check_model_treats_examples_apart
from tff_pdp.models.layers import RecordingWeights

layers = tf.keras.layers


def cnn():
    return tf.keras.Sequential(
        [
            tf.keras.Input((6, 6, 2)),
            layers.Conv2D(4, 3, strides=2, padding="same", activation="relu"),
            layers.GroupNormalization(2),
            layers.SpatialDropout2D(0.2),
            layers.Flatten(),
            layers.Dense(8, use_bias=False, activation="tanh"),
            layers.LayerNormalization(),
            layers.Dropout(0.5),
            layers.Dense(3),
        ]
    )


def text(recurrent):
    ids = tf.keras.Input((7,), dtype="int32")
    embedded = layers.Embedding(11, 4, mask_zero=True)(ids)
    return tf.keras.Model(ids, layers.Dense(3)(recurrent(embedded)))


class Twice(tf.keras.Model):
    """A model that uses one layer twice, and a list of variables."""

    def __init__(self):
        super().__init__()
        self.inner = layers.Dense(5, activation="tanh")
        self.scales = [tf.Variable([2.0] * 5, name="scale")]
        self.last = layers.Dense(3)

    def call(self, x):
        return self.last(self.inner(self.inner(x)) * self.scales[0])


MODELS = {
    "cnn": cnn,
    "lstm": lambda: text(layers.LSTM(3)),
    "lstm, both ways": lambda: text(layers.Bidirectional(layers.LSTM(3))),
    "lstm, stacked": lambda: text(tf.keras.Sequential([layers.LSTM(3, return_sequences=True), layers.LSTM(2)])),
    "gru": lambda: text(layers.GRU(3)),
    "gru, reset before": lambda: text(layers.GRU(3, reset_after=False)),
    "simple rnn": lambda: text(layers.SimpleRNN(3)),
    "layer used twice": Twice,
    "a layer over time": lambda: tf.keras.Sequential(
        [tf.keras.Input((4, 2)), layers.TimeDistributed(layers.Dense(3)), layers.Flatten(), layers.Dense(3)]
    ),
}
# Every weight's gradient has a closed form.
CLOSED = set(MODELS) - {"gru, reset before", "layer used twice", "a layer over time"}


def examples_of(model, rows=6):
    rng = np.random.default_rng(1)
    if model.input_shape == (7,):
        ids = rng.integers(1, 11, (rows, 7))
        ids[rng.random((rows, 7)) < 0.3] = 0
        return tf.constant(ids, tf.float32)
    return tf.constant(rng.normal(size=(rows, *model.input_shape)), tf.float32)


def moved_weights(keras, model):
    """Weights other than the initial ones, and a Keras model that has them."""
    rng = np.random.default_rng(2)
    weights = {name: np.float32(array + rng.normal(size=array.shape) * 0.3) for name, array in model.init(0).items()}
    keras.set_weights(list(weights.values()))
    return {name: tf.constant(array) for name, array in weights.items()}


@pytest.mark.parametrize("name", sorted(MODELS))
def test_predictions_are_those_of_keras(name):
    keras = MODELS[name]()
    model = from_keras(keras, 3, input_shape=(5,) if name == "layer used twice" else None)
    assert sorted(a.shape for a in model.init(0).values()) == sorted(tuple(w.shape) for w in keras.trainable_weights)
    x = examples_of(model)
    order = [value.numpy() for value in keras.trainable_weights]
    assert all(np.array_equal(one, other) for one, other in zip(order, model.init(0).values(), strict=True))
    weights = moved_weights(keras, model)
    expected = keras(x, training=False)
    # Roundings of a few sums, in another order.
    np.testing.assert_allclose(model.predict(weights, x), expected, atol=1e-6 * max(1, np.abs(expected).max()))
    graph = tf.function(lambda given, own: model.predict(own, given), autograph=False)
    np.testing.assert_allclose(graph(x, weights), expected, atol=1e-6 * max(1, np.abs(expected).max()))
    recording = RecordingWeights(weights)
    model.predict(recording, x)
    assert (recording.without_closed_form() == []) == (name in CLOSED)


@pytest.mark.parametrize("name", ["cnn", "lstm", "gru", "a layer over time"])
def test_models_meet_the_contract(name):
    keras = MODELS[name]()
    testing.check_model(lambda input_shape, num_classes: from_keras(keras, num_classes), keras.input_shape[1:], 3)


def test_names_do_not_depend_on_what_was_built_before():
    first, second = (from_keras(text(layers.LSTM(3, name="reader"))) for _ in range(2))
    assert list(first.init(0)) == list(second.init(0))
    assert list(first.init(0)) == [
        "embedding/embeddings",
        "reader/lstm_cell/kernel",
        "reader/lstm_cell/recurrent_kernel",
        "reader/lstm_cell/bias",
        "dense/kernel",
        "dense/bias",
    ]
    assert first.head == ("dense/kernel", "dense/bias")
    of_cnn = [list(from_keras(cnn()).init(0)) for _ in range(2)]
    assert of_cnn[0] == of_cnn[1]
    assert {name.partition("/")[0] for name in of_cnn[0]} == {
        "conv2d",
        "group_normalization",
        "dense",
        "layer_normalization",
        "dense_1",
    }


def test_the_keras_model_stays_as_it_is():
    keras = cnn()
    before = [dict(vars(layer)) for layer in keras.layers]
    model = from_keras(keras)
    weights = {name: tf.constant(array) * 2.0 for name, array in model.init(0).items()}
    draws = RowDraws(tf.constant([1, 2], tf.int64), tf.range(6, dtype=tf.int64))
    model.training_predict(weights, examples_of(model), draws)
    for layer, attributes in zip(keras.layers, before, strict=True):
        kept = {name: value for name, value in vars(layer).items() if not name.startswith("_saved_model")}
        assert all(attributes[name] is value for name, value in kept.items() if name in attributes)
        assert "call" not in kept
    # Nor do later values of the Keras model change what was made of it.
    keras.set_weights([value * 0 for value in keras.get_weights()])
    assert any(array.any() for array in model.init(0).values())


def test_dropout_is_each_examples_own_and_for_training_alone():
    model = from_keras(cnn())
    weights = {name: tf.constant(array) for name, array in model.init(0).items()}
    x = examples_of(model)

    def drawn(rows, step=1, given=x):
        draws = RowDraws(tf.constant([step, 2], tf.int64), tf.constant(rows, tf.int64))
        return model.training_predict(weights, given, draws).numpy()

    first = drawn(range(6))
    np.testing.assert_array_equal(drawn(range(6)), first)
    assert (drawn(range(6), step=2) != first).any(axis=1).all()
    # Another example and another place in row 2 change row 2 alone.
    changed = x.numpy()
    changed[2] += 1.0
    other = drawn([0, 1, 99, 3, 4, 5], given=tf.constant(changed))
    assert (other != first).any(axis=1).tolist() == [False, False, True, False, False, False]
    assert not np.array_equal(first, model.predict(weights, x))
    assert from_keras(text(layers.LSTM(3))).training_predict is None
    assert from_keras(text(layers.LSTM(3, dropout=0.2))).training_predict is not None


@pytest.mark.parametrize(
    ("units", "activation", "num_classes", "expected"),
    [(3, "softmax", None, 3), (3, None, None, 3), (1, "sigmoid", None, 2), (1, None, None, 0), (1, "sigmoid", 0, 0)],
)
def test_outputs_are_logits_or_values(units, activation, num_classes, expected):
    keras = tf.keras.Sequential([tf.keras.Input((4,)), layers.Dense(units, activation=activation)])
    model = from_keras(keras, num_classes)
    assert model.num_classes == expected
    x = examples_of(model)
    answers = model.answers(model.predict(model.init(0), x)).numpy()
    own = keras(x).numpy()
    if expected == 2:
        own = np.concatenate([1 - own, own], axis=1)
    elif expected == 0:
        own = own[:, 0]
    np.testing.assert_allclose(answers, own if activation or not expected else tf.nn.softmax(own), atol=1e-6)


def test_frozen_layers_are_constants():
    keras = tf.keras.Sequential([tf.keras.Input((4,)), layers.Dense(3), layers.BatchNormalization(), layers.Dense(2)])
    keras.layers[0].trainable = keras.layers[1].trainable = False
    model = from_keras(keras)
    assert list(model.init(0)) == ["dense_1/kernel", "dense_1/bias"]
    x = examples_of(model)
    np.testing.assert_allclose(model.predict(model.init(0), x), keras(x), atol=1e-6)
    check_model_treats_examples_apart(model)


def sequential(*own):
    return tf.keras.Sequential([tf.keras.Input((4,)), layers.Dense(3), *own, layers.Dense(2)])


class Counting(layers.Layer):
    def build(self, shape):
        self.calls = tf.Variable(0.0, trainable=False)

    def call(self, x):
        self.calls.assign_add(1.0)
        return x * self.calls


class Noisy(layers.Layer):
    def call(self, x):
        return x + tf.random.normal(tf.shape(x))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: sequential(layers.BatchNormalization(name="norm")), r"layer 'norm' \(BatchNorm.*LayerNormalization"),
        (lambda: sequential(layers.GaussianNoise(0.1, name="noise")), r"layer 'noise' .*not dropout masks"),
        (lambda: sequential(layers.Dropout(0.1, noise_shape=(1, 3), name="d")), r"layer 'd' .*one mask for several"),
        (lambda: sequential(layers.Dense(3, kernel_regularizer="l2", name="r")), r"layer 'r' .*regularizer"),
        (lambda: sequential(layers.Dense(3, kernel_constraint="non_neg", name="c")), r"layer 'c' .*constraint"),
        (lambda: sequential(Counting()), "assigns a variable .* keeps state"),
        (lambda: sequential(Noisy()), "RandomStandardNormal"),
        (lambda: sequential(layers.Reshape((3, 1)), layers.TimeDistributed(layers.Dropout(0.5)), layers.Flatten()),
         "outside of TimeDistributed"),
        (lambda: tf.keras.Sequential([layers.Dense(3)]), "does not say the shape"),
        (lambda: sequential(layers.Dense(5, dtype="mixed_float16")), "float16"),
    ],
)  # fmt: skip
def test_what_cannot_be_trained_is_refused(build, message):
    with pytest.raises(ConfigError, match=message):
        from_keras(build(), 2)


def test_numbers_of_outputs_must_fit():
    keras = tf.keras.Sequential([tf.keras.Input((4,)), layers.Dense(3)])
    with pytest.raises(ConfigError, match=r"outputs of shape \(3,\), and 5 output"):
        from_keras(keras, 5)
    with pytest.raises(ConfigError, match="are probabilities"):
        from_keras(tf.keras.Sequential([tf.keras.Input((4,)), keras, layers.Lambda(tf.nn.softmax)]), 3)


@pytest.mark.parametrize(
    "mix",
    [
        lambda x: x - tf.reduce_mean(x, axis=0, keepdims=True),
        lambda x: x + 1e-6 * tf.reduce_max(x),
        lambda x: tf.reverse(x, axis=[0]),
        lambda x: x / tf.cast(tf.shape(x)[0], tf.float32),
        lambda x: x + tf.stop_gradient(x[:1] * 0.01),
    ],
)
def test_layers_that_mix_examples_are_found(mix):
    keras = tf.keras.Sequential([tf.keras.Input((4,)), layers.Dense(3), layers.Lambda(mix), layers.Dense(2)])
    with pytest.raises(ConfigError, match="of an example"):
        check_model_treats_examples_apart(from_keras(keras))


def test_several_threads_may_call_one_model():
    from concurrent.futures import ThreadPoolExecutor

    model = from_keras(cnn())
    x = examples_of(model)
    several = [{name: tf.constant(array * factor) for name, array in model.init(0).items()} for factor in (1.0, 2.0)]
    expected = [model.predict(weights, x).numpy() for weights in several]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda number: model.predict(several[number % 2], x).numpy(), range(20)))
    for number, one in enumerate(found):
        np.testing.assert_array_equal(one, expected[number % 2])
