"""Metrics of clients' models: a ranking's figure, in every engine and by methods of every kind."""

import collections
import dataclasses
import logging
import math

import numpy as np
import pytest
import tensorflow as tf
from sklearn.metrics import average_precision_score

from tests.contract.contract_support import SMALLER
from tests.rounding import ELEMENTARY, gamma
from tests.tiers import parameters
from tff_pdp.experiment.hparams import build_algorithm
from tff_pdp.models.average_precision import RANKING
from tff_pdp.models.dense import build_linear_svm, build_logistic_regression, build_mlp
from tff_pdp.testing.algorithms import composed

MODEL = build_logistic_regression((2,), metric="average_precision")
# With a body for those methods that share one, and a head that starts alive.
TWO_PARTS = dataclasses.replace(build_mlp((2,), 2, (3,)), ranking=RANKING)
# One of each kind: no state, a row of a matrix, clusters, own heads, masks, weights that are made from an embedding.
DIFFERENT = ("fed_avg", "mocha", "ifca_mr_mtl", "centaur", "dp_pfed_dsu", "udp_hypernet")
# Examples of each client, and rows of its data.
SIZES, ROWS = (7, 9, 4, 0, 0), (9, 9, 4, 4, 0)


# Figures that are sums of whole numbers, or computed in float64, and rounded to float32 once.
STORED = gamma(2)


def process_of(name, model=MODEL):
    algorithm, _ = build_algorithm(name, SMALLER.get(name, {}), num_clients=len(SIZES), rounds=1, head=model.head)
    return composed(algorithm, model)


def client_data():
    """The third client has no positive example. Features are whole numbers, so that scores are tied."""
    rng = np.random.default_rng(0)
    data = []
    for place, (size, rows) in enumerate(zip(SIZES, ROWS, strict=True)):
        x, y = np.full([rows, 2], math.nan, np.float32), np.full(rows, 5, np.int64)
        x[:size] = rng.integers(-2, 3, (size, 2))
        y[:size] = rng.integers(0, 2, size) if place != 2 else 0
        data.append(collections.OrderedDict(x=x, y=y, num_examples=np.int32(size)))
    return data


def states_of(process, server):
    """Clients whose models differ."""
    rng = np.random.default_rng(1)
    first = process.init_client(server)
    return [
        tf.nest.map_structure(lambda leaf: rng.integers(-2, 3, leaf.shape).astype(np.float32), first) for _ in SIZES
    ]


def test_average_precision_is_that_of_scikit_learn_on_each_clients_own_examples(engine, caplog):
    process, data = process_of("local_only"), client_data()
    with engine.install(), caplog.at_level(logging.WARNING):
        server = process.initialize()
        states = states_of(process, server)
        weights = list(process.personalise(server, states))
        metrics = list(process.evaluate(server, states, data))
    assert not caplog.records, "the stacks were given up"
    assert [list(row["personal"]) for row in metrics] == [["accuracy", "loss", "average_precision"]] * len(SIZES)
    for own, examples, row in zip(weights, data, metrics, strict=True):
        found, y = row["personal"], examples["y"][: examples["num_examples"]]
        assert found["average_precision"].dtype == np.float32
        if not (y == 1).any():
            assert math.isnan(found["average_precision"])
            continue
        # Of small integers, so exact.
        scores = (examples["x"][: len(y)] @ own["dense_0/kernel"][:, 0] + own["dense_0/bias"]).astype(np.float64)
        assert len(set(scores)) < len(scores), "this test needs ties"
        assert found["average_precision"] == pytest.approx(average_precision_score(y, scores), rel=STORED)
        assert found["accuracy"] == pytest.approx(np.mean((scores > 0) == y), rel=STORED)
        # A softplus of each, all positive, their sum and a quotient.
        loss = np.mean(np.log1p(np.exp(-scores * (2 * y - 1))))
        assert found["loss"] == pytest.approx(loss, rel=gamma(2 * ELEMENTARY + len(y) + 1))
    # Who has examples, but none to rank first, has the other figures.
    assert metrics[2]["personal"]["loss"] > 0


def test_the_shared_model_is_ranked_too(engine):
    process, data = process_of("fed_avg"), client_data()
    with engine.install():
        server = process.initialize()
        metrics = process.evaluate(server, [process.init_client(server)] * len(SIZES), data)
    # It starts from zero, so that all examples are tied.
    shares = [np.mean(examples["y"][: examples["num_examples"]]) for examples in data[:2]]
    for share, row in zip(shares, metrics[:2], strict=True):
        for kind in ("personal", "global"):
            assert row[kind]["average_precision"] == pytest.approx(share, rel=STORED)


@pytest.mark.parametrize("name", parameters(DIFFERENT, test=["mocha", "udp_hypernet"]))
def test_whatever_personal_models_are_made_of_stacks_are_ranked_like_clients_one_by_one(name, engines, caplog):
    process, data = process_of(name, TWO_PARTS), client_data()
    found = {}
    for mode in ("loop", "vectorized"):
        with engines[mode].install(), caplog.at_level(logging.WARNING):
            server = process.initialize()
            clients = [process.init_client(server)] * len(SIZES)
            found[mode] = [
                float(row["personal"]["average_precision"]) for row in process.evaluate(server, clients, data)
            ]
    assert not caplog.records, "the stacks were given up"
    np.testing.assert_allclose(found["vectorized"], found["loop"], rtol=2 * STORED)
    np.testing.assert_array_equal(np.isnan(found["loop"]), [False, False, True, True, True])


def test_a_model_that_is_not_judged_by_a_ranking_has_none(engine):
    model = build_linear_svm((2,))
    process = process_of("local_only", model)
    with engine.install():
        server = process.initialize()
        (row, *_) = process.evaluate(server, [process.init_client(server)] * len(SIZES), client_data())
    assert list(row["personal"]) == ["accuracy", "loss"]
