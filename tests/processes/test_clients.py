"""What clients compute in composed processes, where the graphs are those that TFF builds."""

import collections
import dataclasses
import math

import numpy as np
import pytest
import tensorflow as tf

from tests.rounding import ELEMENTARY, gamma, network_roundings
from tff_pdp.algorithms.base import ClientResult, map_weights
from tff_pdp.algorithms.local_sgd import local_sgd
from tff_pdp.algorithms.minibatch import build_minibatch
from tff_pdp.experiment.kinds import ALGORITHMS
from tff_pdp.models import layers
from tff_pdp.models.base import Model
from tff_pdp.models.convolutional import build_cnn
from tff_pdp.models.dense import build_linear, build_linear_regression
from tff_pdp.privacy.mechanisms.dp_sgd import build_dp_sgd
from tff_pdp.processes.compose import compose

LINEAR = build_linear((2,), 3)


def client(x, y, num_examples=None):
    x = np.asarray(x, np.float32)
    return collections.OrderedDict(
        x=x, y=np.asarray(y), num_examples=np.int32(len(x) if num_examples is None else num_examples)
    )


def params(estimator, index=0, local_steps=2, noise_multiplier=0.0, **hparams):
    mechanism = {"clip_norm": 0.5, "noise_multiplier": noise_multiplier, "sampling_rate": 0.5, "expected_batch_size": 2}
    return collections.OrderedDict(
        mechanism=collections.OrderedDict((name, np.float32(mechanism[name])) for name in estimator.mechanism),
        hparams=collections.OrderedDict(
            learning_rate=np.float32(0.1),
            local_steps=np.int32(local_steps),
            **{name: np.float32(value) for name, value in hparams.items()},
        ),
        seed=np.array([3 * index, 5], np.int64),
    )


def one_round(process, data, client_params):
    """The server's weights after a round, flat."""
    server = process.initialize()
    server, _, _ = process.next(server, [process.init_client(server)] * len(data), data, client_params)
    return np.concatenate([np.ravel(array) for array in server["algorithm"]["weights"].values()])


def test_a_client_without_examples_moves_nothing_whatever_its_padding_holds(engine):
    estimator = build_minibatch(LINEAR, 2)
    process = compose(ALGORITHMS.find("fed_avg")(), LINEAR, estimator=estimator)
    nobody = client([[math.nan, math.inf]] * 3, [-1, 7, -1], num_examples=0)
    somebody = client([[1, 2], [3, 4], [5, 6]], [0, 1, 2])
    with engine.install():
        assert not one_round(process, [nobody, nobody], [params(estimator)] * 2).any()
        alone = one_round(process, [somebody], [params(estimator)])
        together = one_round(process, [nobody, somebody], [params(estimator)] * 2)
    # Two steps on batches of two, and a mean.
    bound = 2 * gamma(2 * network_roundings(LINEAR.init(0), 2) + 2) * np.abs(alone).max()
    np.testing.assert_allclose(2 * together, alone, atol=bound)


def test_a_client_that_has_finished_sees_no_further_batch(engine):
    model = build_linear_regression((1,))
    estimator = build_minibatch(model, 2)
    process = compose(ALGORITHMS.find("fed_avg")(), model, estimator=estimator)
    data = [client(x, np.ones(4, np.float32)) for x in ([[1], [1], [math.nan], [math.inf]], [[1], [1], [1], [1]])]
    with engine.install():
        moved = one_round(process, data, [params(estimator, local_steps=1), params(estimator, local_steps=3)])
    assert np.isfinite(moved).all()


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(lambda model: build_minibatch(model, 2), marks=pytest.mark.all, id="minibatch"),
        pytest.param(build_dp_sgd, id="dp_sgd"),
    ],
)
def test_a_model_of_text_on_every_engine(build, engines):
    def predict(weights, x):
        embedded = layers.dense(weights, "table", tf.one_hot(tf.cast(x, tf.int32), 5))
        return layers.dense(weights, "dense", tf.reduce_mean(embedded, axis=1))

    def init(seed):
        rng = np.random.default_rng(seed)
        shapes = {"table/kernel": (5, 3), "table/bias": (3,), "dense/kernel": (3, 2), "dense/bias": (2,)}
        return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}

    model = Model("text", (4,), 2, init, predict, ("dense/kernel", "dense/bias"))
    estimator = build(model)
    process = compose(ALGORITHMS.find("fed_avg")(), model, estimator=estimator)
    # Ids repeat within an example.
    data = [client([[1, 1, 1, 2], [0, 1, 0, 1], [4, 4, 4, 4]], [0, 1, 1])] * 2
    results = []
    for engine in engines.values():
        with engine.install():
            results.append(one_round(process, data, [params(estimator, 0), params(estimator, 1)]))
    # Two steps, of norms that sum up gradients too, and a mean.
    bound = 2 * gamma(2 * (network_roundings(init(0), 3, 4) + model.num_parameters()) + 2) * np.abs(results[0]).max()
    for other in results[1:]:
        np.testing.assert_allclose(other, results[0], atol=bound)


def two_passes():
    """Releases the difference of two first gradients, of one pass over the data and of another."""
    fed_avg = ALGORITHMS.find("fed_avg")()

    def client_update(broadcast, client_state, data, grad_fn, hparams):
        first, second = (
            local_sgd(
                broadcast["weights"],
                data,
                grad_fn,
                learning_rate=hparams["learning_rate"],
                local_steps=hparams["local_steps"],
                first_index=data_pass * hparams["local_steps"].count if data_pass else 0,
            )
            for data_pass in (0, 1)
        )
        return ClientResult(state={}, released={"update": map_weights(tf.subtract, first, second)})

    return dataclasses.replace(fed_avg, data_passes=2, client_update=client_update)


def test_passes_over_the_data_share_no_noise(engine):
    estimator = build_dp_sgd(LINEAR)
    process = compose(two_passes(), LINEAR, estimator=estimator)
    data = [client([[1, 2], [3, 4], [5, 6]], [0, 1, 2])] * 3
    given = [params(estimator, index, local_steps=index + 1, noise_multiplier=1000.0) for index in range(3)]
    with engine.install():
        differences = [one_round(process, data[:1], [one]) for one in given]
        together = one_round(process, data, given)
    for steps, difference in enumerate(differences, 1):
        # Of two sums of as many draws with 0.1 / 2 * 0.5 * 1000 each.
        expected = 25 * math.sqrt(2 * steps)
        assert 0.3 * expected < difference.std() < 3 * expected
    # Whoever takes fewer steps than others draws the same as alone.
    # What sines and logarithms round of noise, in two passes of up to three steps, and in the sums of three clients; no
    # partial sum is much longer than the largest of nine values of the result.
    bound = 2 * gamma(2 * 3 * (3 * ELEMENTARY + 8) + 3) * np.abs(sum(differences)).max()
    np.testing.assert_allclose(3 * together, sum(differences), atol=bound)


def test_evaluation_on_no_rows_at_all(engine):
    model = build_cnn((6, 6, 1), 2, (2, 2), 3, 4)
    process = compose(ALGORITHMS.find("fed_avg")(), model, estimator=build_dp_sgd(model))
    rng = np.random.default_rng(0)
    some = client(rng.normal(size=(4, 6, 6, 1)), np.array([0, 1, 1, 0]))
    none = client(np.zeros([0, 6, 6, 1]), np.zeros(0, np.int64))
    with engine.install():
        server = process.initialize()
        nobody, somebody = process.evaluate(server, [process.init_client(server)] * 2, [none, some])
    assert math.isnan(nobody["personal"]["accuracy"])
    assert 0 <= somebody["personal"]["accuracy"] <= 1
    assert somebody["personal"]["loss"] > 0
