import math

import numpy as np
import pytest
import tensorflow as tf

from tests.models.float64_support import per_example_norms
from tests.models.settings_support import build_from_settings
from tests.rounding import ELEMENTARY, assert_within, gamma
from tff_pdp.errors import ConfigError
from tff_pdp.experiment.kinds import MODELS
from tff_pdp.models.dense import focal_loss
from tff_pdp.privacy.mechanisms.per_example import clipped_sum

LOG3 = math.log(3)
# Scores are log 3 times x1, plus x2: for class 1, probabilities 3/4, 1/4, 9/10 and 1/2.
WEIGHTS = {"dense_0/kernel": np.array([[LOG3], [1.0]], np.float32), "dense_0/bias": np.array([0.0], np.float32)}
X = tf.constant([[1.0, 0.0], [-1.0, 0.0], [2.0, 0.0], [0.0, 0.0]])
Y = tf.constant([1, 1, 0, 0], tf.int64)
OF_OWN_CLASS = np.array([3 / 4, 1 / 4, 1 / 10, 1 / 2])
# A score is a rounded log 3 times a small integer, plus nothing.
SCORE = gamma(4)


def rounding(focus=0.0):
    """Relative, of probabilities and losses of these scores.

    A margin of up to 2 log 3 passes its error on at most `focus + 1` times its size. Both softplus are at most log 10 =
    2.3, one of them in the exponent of the focus; a softmax has an exponential less.
    """
    return (focus + 1) * 2 * LOG3 * SCORE + gamma(int(ELEMENTARY * (3 * focus + 4)))


def test_scores_cross_entropy_and_accuracy_by_hand():
    model = MODELS.find("logistic_regression")((2,), 2)
    outputs = model.predict(WEIGHTS, X)
    np.testing.assert_allclose(outputs, np.stack([[0] * 4, [LOG3, -LOG3, 2 * LOG3, 0]], axis=1), rtol=SCORE)
    np.testing.assert_allclose(model.answers(outputs)[:, 1], [3 / 4, 1 / 4, 9 / 10, 1 / 2], rtol=rounding())
    np.testing.assert_allclose(model.scores(outputs), [LOG3, -LOG3, 2 * LOG3, 0], rtol=SCORE)
    metrics = model.example_metrics(WEIGHTS, X, Y)
    assert list(metrics) == ["accuracy", "loss"]
    np.testing.assert_array_equal(metrics["accuracy"], [1, 0, 0, 1])
    np.testing.assert_allclose(metrics["loss"], -np.log(OF_OWN_CLASS), rtol=rounding())


def test_focal_loss_by_hand():
    model = MODELS.find("logistic_regression")((2,), 2, focal_gamma=2.0, focal_alpha=0.75)
    expected = np.array(
        [0.75 / 16 * math.log(4 / 3), 0.75 * 9 / 16 * math.log(4), 0.25 * 0.81 * math.log(10), 0.25 / 4 * math.log(2)]
    )
    np.testing.assert_allclose(model.loss(WEIGHTS, X, Y), expected, rtol=rounding(2.0))
    # Weights alone, and the focus alone.
    outputs = model.predict(WEIGHTS, X)
    np.testing.assert_allclose(
        focal_loss(alpha=0.75)(outputs, Y), [0.75, 0.75, 0.25, 0.25] * -np.log(OF_OWN_CLASS), rtol=rounding()
    )
    np.testing.assert_allclose(
        focal_loss(gamma=0.5)(outputs, Y), (1 - OF_OWN_CLASS) ** 0.5 * -np.log(OF_OWN_CLASS), rtol=rounding(0.5)
    )
    # What the sums round is a margin's error, whose share a loss with a focus of 2 moves by up to three times of.
    moved = 3 * gamma(2) * (5 + 2 * LOG3)
    np.testing.assert_allclose(
        focal_loss(2.0)(outputs + 5.0, Y), focal_loss(2.0)(outputs, Y), rtol=2 * rounding(2) + moved
    )


@pytest.mark.parametrize(("focus", "alpha"), [(0.0, None), (0.0, 0.3), (0.5, None), (2.0, 0.75), (5.0, 0.25)])
def test_its_derivative_is_the_closed_form_and_the_limit_of_differences(focus, alpha):
    furthest = 15
    scores = np.linspace(-furthest, furthest, 61)
    # As of the scores by hand, but the margins are exact, and both softplus up to 15.
    float64 = gamma(int(ELEMENTARY * (focus * furthest + 4)), np.float64)
    for label in (0, 1):
        y = np.full(len(scores), label)
        margin = scores * (2 * label - 1)
        own, other = 1 / (1 + np.exp(-margin)), 1 / (1 + np.exp(margin))
        weight = 1.0 if alpha is None else alpha if label else 1 - alpha
        # Appendix B of the paper.
        expected = weight * (2 * label - 1) * other**focus * (-focus * own * np.log1p(np.exp(-margin)) - other)
        _, slopes = _loss_and_slopes(focus, alpha, scores, y, np.float64)
        np.testing.assert_allclose(slopes, expected, rtol=2 * float64)
        step = 1e-5
        above, below = (_loss_and_slopes(focus, alpha, scores + d, y, np.float64)[0] for d in (step, -step))
        # A third derivative is at most (focus + 1)^2 slopes; two losses of up to 15 are rounded, and scores that move.
        errors = {"rtol": (focus + 1) ** 2 * step**2 / 6 + float64, "atol": furthest * float64 / step}
        np.testing.assert_allclose((above - below) / (2 * step), expected, **errors)


@pytest.mark.parametrize(("focus", "alpha"), [(0.0, None), (0.5, None), (2.0, 0.75)])
def test_far_from_zero_it_is_a_line_on_one_side_and_nothing_on_the_other(focus, alpha):
    weight = 1.0 if alpha is None else alpha
    for far in (1e4, 1e30):
        loss, slopes = _loss_and_slopes(focus, alpha, [-far, far], [1, 1], np.float32)
        # A softplus, an exponential of nothing and the weight.
        np.testing.assert_allclose(loss, [weight * far, 0.0], rtol=gamma(2 * ELEMENTARY + 4))
        np.testing.assert_array_equal(slopes, np.array([-weight, 0.0], np.float32))


def _loss_and_slopes(focus, alpha, scores, y, dtype):
    scores = tf.constant(np.asarray(scores, dtype))
    with tf.GradientTape() as tape:
        tape.watch(scores)
        loss = focal_loss(focus, alpha)(tf.stack([tf.zeros_like(scores), scores], axis=1), tf.constant(y, tf.int64))
    return loss.numpy(), tape.gradient(loss, scores).numpy()


@pytest.mark.parametrize(("focus", "alpha"), [(0.0, None), (2.0, 0.75)])
def test_gradients_of_examples_have_the_closed_form_of_a_layer(focus, alpha, caplog):
    model = MODELS.find("logistic_regression")((2,), 2, focal_gamma=focus, focal_alpha=alpha, input_shift=1.0)
    x = X + tf.constant([[0.5, -2.0]])
    scores = np.float64(x + 1.0) @ np.float64(WEIGHTS["dense_0/kernel"])[:, 0]
    _, slopes = _loss_and_slopes(focus, alpha, scores, Y, np.float64)
    # An example's gradient is the loss's slope at its score times (x1, x2, 1), with features shifted.
    rows = slopes[:, None] * np.append(x + 1.0, np.ones([4, 1]), axis=1)
    norms = np.linalg.norm(rows, axis=1)
    # A score is off by its terms' share, which a slope moves by up to (focus + 1) times of; both softplus are no larger
    # than the largest score and log 2.
    terms = np.abs(x + 1.0) @ np.abs(WEIGHTS["dense_0/kernel"])
    largest = np.abs(scores).max() + math.log(2)
    bound = (focus + 1) * SCORE * terms.max() + gamma(int(ELEMENTARY * (focus * largest + 4)) + 5)
    np.testing.assert_allclose(per_example_norms(model, WEIGHTS, x, Y), norms, rtol=bound)
    clip_norm, included = float(np.median(norms)), np.array([1, 0, 1, 1])
    clipped = clipped_sum(
        model, WEIGHTS, x, Y, clip_norm=tf.constant(clip_norm, tf.float32), included=tf.constant(included, tf.float32)
    )
    factors = included * np.minimum(1, clip_norm / norms)
    found = np.append(clipped["dense_0/kernel"], clipped["dense_0/bias"])
    # Twice, with the norm that divides.
    assert_within(found, factors @ rows, (2 * bound + gamma(8)) * (factors @ np.abs(rows)))
    assert not caplog.records, "it has a closed form"


def test_an_example_far_out_moves_a_clipped_sum_no_further_than_others():
    model = MODELS.find("logistic_regression")((2,), 2, focal_gamma=2.0, focal_alpha=0.75)
    far = tf.constant([[-1e4, 0.0], [1e4, 0.0], [1e15, 0.0]])
    labels = tf.constant([1, 1, 0], tf.int64)
    for row in range(3):
        included = tf.one_hot(row, 3)
        found = clipped_sum(model, WEIGHTS, far, labels, clip_norm=tf.constant(2.0), included=included)
        norm = np.linalg.norm(np.append(found["dense_0/kernel"], found["dense_0/bias"]))
        # Three squares and their root, a quotient and a product.
        assert norm == pytest.approx(0.0 if row == 1 else 2.0, rel=gamma(8))


def test_it_starts_from_zero_with_one_kernel_for_both_classes():
    model = MODELS.find("logistic_regression")((3, 2, 1), 2, input_shift=-1.0, input_scale=2.0)
    initial = model.init(7)
    assert (model.name, model.num_classes, model.label_dtype) == ("logistic_regression", 2, np.int64)
    assert model.num_parameters() == 6 + 1
    assert set(model.head) == set(initial)
    assert not any(array.any() for array in initial.values())
    ones = {name: np.ones_like(array) for name, array in initial.items()}
    np.testing.assert_array_equal(model.predict(ones, tf.fill([1, 3, 2, 1], 2.0)), [[0.0, 13.0]])


def test_it_is_judged_by_accuracy_or_by_average_precision():
    metrics = [
        MODELS.find("logistic_regression")((2,), metric=name).metric for name in ("accuracy", "average_precision")
    ]
    assert [metric.name for metric in metrics] == ["accuracy", "average_precision"]
    assert MODELS.find("logistic_regression")((2,)).metric == metrics[0]
    assert all(metric.higher_is_better for metric in metrics)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_classes": 0}, "separates 2 classes, but data.num_classes is 0"),
        ({"num_classes": 3}, "separates 2 classes, but data.num_classes is 3"),
        ({"focal_gamma": -0.1}, "model.focal_gamma must be a number of at least 0, not -0.1"),
        ({"focal_gamma": math.nan}, "focal_gamma must be"),
        ({"focal_gamma": "2"}, "model.focal_gamma must be a number of at least 0, not '2'"),
        ({"focal_alpha": 1.0}, "model.focal_alpha must be a number above 0 and below 1, .*not 1.0"),
        ({"focal_alpha": True}, "focal_alpha must be"),
        ({"metric": "auc"}, "model.metric must be one of accuracy, average_precision, not 'auc'"),
    ],
)
def test_arguments_that_mean_nothing_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        build_from_settings("logistic_regression", **{"input_shape": (2,), "num_classes": 2, **arguments})
