import numpy as np
import pytest
import tensorflow as tf

from tests.models.settings_support import build_from_settings
from tff_pdp.errors import ConfigError
from tff_pdp.models.layers import RecordingWeights
from tff_pdp.models.text import build_text
from tff_pdp.testing import check_model


def weights_by_hand():
    return {
        # Rows are ids: padding, then 1, 2 and 3.
        "embedding/kernel": np.array([[9.0, 9.0], [1.0, 0.0], [3.0, 2.0], [-5.0, 4.0]], np.float32),
        "embedding/bias": np.array([0.5, -1.0], np.float32),
        "dense_0/kernel": np.array([[1.0, 2.0], [0.0, -1.0]], np.float32),
        "dense_0/bias": np.array([0.0, 10.0], np.float32),
    }


def test_the_mean_is_over_tokens_that_are_there():
    model = build_text((3,), 2, vocabulary_size=4, embedding_size=2)
    # Means of embeddings: (1 + 3) / 2 and (0 + 2) / 2; one token alone; nothing at all; an unknown id and a token.
    x = tf.constant([[1.0, 2.0, 0.0], [0.0, 3.0, 0.0], [0.0, 0.0, 0.0], [4.0, 1.0, -1.0]])
    means = np.array([[2.0, 1.0], [-5.0, 4.0], [0.0, 0.0], [1.0, 0.0]])
    hidden = means + np.array([0.5, -1.0])
    expected = np.stack([hidden[:, 0], 2 * hidden[:, 0] - hidden[:, 1] + 10], axis=1)
    np.testing.assert_array_equal(model.predict(weights_by_hand(), x), expected)


def test_a_token_that_occurs_twice_counts_twice_and_order_does_not_matter():
    model = build_text((3,), 2, vocabulary_size=4, embedding_size=2)
    one, other = model.predict(weights_by_hand(), tf.constant([[1.0, 1.0, 2.0], [2.0, 1.0, 1.0]])).numpy()
    np.testing.assert_array_equal(one, other)
    # (1 + 1 + 3) / 3 + 0.5
    np.testing.assert_allclose(one[0], 5 / 3 + 0.5, rtol=1e-6)


@pytest.mark.parametrize(("num_classes", "hidden_units"), [(3, ()), (0, (2,))])
def test_it_keeps_the_contract_of_models(num_classes, hidden_units):
    check_model(build_text, (5,), num_classes, vocabulary_size=7, embedding_size=3, hidden_units=hidden_units)


def test_gradients_of_single_examples_have_a_closed_form():
    model = build_text((4,), 2, vocabulary_size=5, embedding_size=3, hidden_units=(2,))
    recording = RecordingWeights(model.init(0))
    model.predict(recording, tf.constant([[1.0, 2.0, 0.0, 0.0]]))
    assert recording.without_closed_form() == []


def test_clipped_sums_of_token_ids_are_those_of_single_examples():
    from tff_pdp.privacy.mechanisms.per_example import clipped_sum

    model = build_text((4,), 2, vocabulary_size=5, embedding_size=3)
    weights = {name: tf.constant(array) for name, array in model.init(1).items()}
    x = tf.constant([[1.0, 2.0, 2.0, 0.0], [4.0, 0.0, 0.0, 0.0], [3.0, 1.0, 4.0, 2.0]])
    y = tf.constant([0, 1, 1], tf.int64)
    clip = 0.3
    total = clipped_sum(model, weights, x, y, clip_norm=tf.constant(clip), included=tf.ones(3))
    expected = {name: np.zeros(array.shape) for name, array in weights.items()}
    for row in range(3):
        with tf.GradientTape() as tape:
            tape.watch(list(weights.values()))
            loss = tf.reduce_sum(model.loss(weights, x[row : row + 1], y[row : row + 1]))
        gradients = dict(zip(weights, tape.gradient(loss, list(weights.values())), strict=True))
        norm = np.sqrt(sum(float(tf.reduce_sum(gradient**2)) for gradient in gradients.values()))
        assert norm > clip
        for name, gradient in gradients.items():
            expected[name] += gradient.numpy() * clip / norm
    for name, right in expected.items():
        np.testing.assert_allclose(total[name], right, atol=1e-6)


def test_settings_are_checked():
    assert build_from_settings("text", (3,), 2, vocabulary_size=4).num_parameters() == 4 * 32 + 32 + 32 * 2 + 2
    with pytest.raises(ConfigError, match=r"of the shape \[sequence_length\], not \[2, 2\]"):
        build_from_settings("text", (2, 2), 2, vocabulary_size=4)
    with pytest.raises(ConfigError, match="at most 2"):
        build_text((3,), 2, vocabulary_size=2**24 + 1)
    with pytest.raises(ConfigError, match="vocabulary_size"):
        build_from_settings("text", (3,), 2, vocabulary_size=1)
