"""What every registered algorithm must do, whatever its method and on every engine; a new entry needs no new code."""

import collections
import logging
import math

import numpy as np
import pytest
import tensorflow as tf

from tests.contract.contract_support import LARGE, VARIANTS, assert_close, assert_same, build, roundings
from tests.rounding import gamma
from tests.tiers import parameters
from tff_pdp import _tff
from tff_pdp.algorithms.base import ClientData, split
from tff_pdp.algorithms.hyper_parameters import LocalSteps, Steps
from tff_pdp.experiment.kinds import ALGORITHMS
from tff_pdp.experiment.run_key import RunKey
from tff_pdp.privacy.mechanisms.selection import NOTHING, build_selector
from tff_pdp.processes.compose import client_data_type, client_params_type
from tff_pdp.testing.algorithms import (
    MODEL,
    SIZES,
    check_declarations,
    check_noise,
    client_data,
    client_params,
    composed,
    estimator_for,
    leaves,
    ready,
    run,
)
from tff_pdp.training.checkpoint import Checkpoint, load_latest, save

# Of clients of one round.
STEPS = (2, 3, 1, 2)


@pytest.fixture(scope="module", params=sorted({*ALGORITHMS.own, *VARIANTS}))
def built(request):
    return build(request.param)


@pytest.fixture(scope="module")
def algorithm(built):
    return built[0]


@pytest.fixture(scope="module")
def process(built):
    return built[1]


def test_it_is_registered_under_its_own_name(algorithm, request):
    assert algorithm.name == request.node.callspec.params["built"]
    assert algorithm.data_passes >= 1
    assert (algorithm.candidates is None) == (algorithm.selection_rounds == 0)
    assert ("adaptation_steps" if algorithm.name == "adapted_to_records" else "local_steps") in algorithm.hparams
    assert any(one.in_adapt for one in algorithm.hparams.values() if isinstance(one, Steps)) == bool(algorithm.adapt)
    assert any(one.is_auto for one in algorithm.hparams.values()) == bool(algorithm.hook)
    assert set(algorithm.released.values()) <= {"mean", "sum", "rows"}


def test_same_seeds_give_the_same_bits(algorithm, process, engine):
    with engine.install():
        assert_same(run(process, algorithm), run(process, algorithm))


@pytest.mark.parametrize("model", [MODEL, LARGE], ids=["small", "large"])
def test_every_engine_gives_the_same_with_noise_and_the_same_seeds(algorithm, process, engines, model, caplog):
    """Clients of different sizes, budgets and numbers of steps, two rounds, and what comes of the state after them."""
    if model is LARGE and algorithm.adapt is not None:
        pytest.skip("is for users, whose gradients carry no noise that could be drawn in another way")
    if model is LARGE:
        process = composed(algorithm, LARGE)
    # Small steps, which do not make errors grow.
    given = {
        "noise_multiplier": (1.0, 2.0, 0.5, 0.0),
        "sampling_rate": (0.5, 0.9, 0.4, 1.0),
        **dict.fromkeys(algorithm.step_hparams, STEPS),
        **{name: 0.03 for name in algorithm.hparams if name.endswith("learning_rate")},
    }
    results = {}
    for name, engine in engines.items():
        with engine.install(), caplog.at_level(logging.WARNING):
            server, clients = run(process, algorithm, 1, **given)
            server, clients, metrics = process.next(
                server, clients, client_data(), client_params(algorithm, 2, **given)
            )
            adapted = ready(process, algorithm, server, clients, **given)
            weights = process.personalise(server, adapted)
            measured = process.evaluate(server, adapted, client_data(1))
            results[name] = server, list(clients), metrics, list(weights), list(measured)
    assert not caplog.records, "the stacks were given up"
    for name in ("loop", "vectorized"):
        # The same containers, too: a caller must not notice which engine it was.
        tf.nest.assert_same_structure(results[name], results["native"])
        for part, native in zip(results[name], results["native"], strict=True):
            assert_close(part, native, roundings(model, steps=max(STEPS), rounds=2))


@pytest.mark.parametrize("padding", parameters([math.nan, math.inf, 1e30], test=[math.inf, 1e30]))
def test_padding_may_hold_anything(algorithm, process, engine, padding):
    with engine.install():
        clean = run(process, algorithm, 2)
        dirty = run(process, algorithm, 2, data=client_data(padding=padding, padding_label=2))
        assert_same(clean, dirty)
        dirty = dirty[0], ready(process, algorithm, *dirty, data=client_data(padding=padding, padding_label=2))
        clean = clean[0], ready(process, algorithm, *clean)
        measured = process.evaluate(*dirty, client_data(1, padding=padding, padding_label=2))
        assert_same(list(process.evaluate(*clean, client_data(1))), list(measured))


def test_without_draws_the_amount_of_padding_does_not_matter(algorithm, process, engine):
    given = {"noise_multiplier": 0.0, "clip_norm": 0.5, "sampling_rate": 1.0}
    with engine.install():
        unpadded, padded, mixed = (
            run(process, algorithm, 2, data=client_data(rows=rows), **given)
            for rows in (SIZES, [20] * len(SIZES), [9, 10, 9, 10])
        )
        adapted = ready(process, algorithm, *unpadded)
        measured = [
            process.evaluate(unpadded[0], adapted, client_data(1, rows=rows)) for rows in (SIZES, [20] * len(SIZES))
        ]
    assert_close(unpadded, padded)
    assert_close(unpadded, mixed)
    assert_close(*measured)


def test_a_round_keeps_types_and_shapes(algorithm, process, engine):
    with engine.install():
        server = process.initialize()
        client = process.init_client(server)
        new_server, new_clients = run(process, algorithm, rounds=1)
    for before, after in zip(leaves((server, client)), leaves((new_server, new_clients[0])), strict=True):
        assert (before.dtype, before.shape) == (after.dtype, after.shape)


def test_state_survives_a_checkpoint_and_training_goes_on_to_the_same_bits(algorithm, process, engine, tmp_path):
    with engine.install():
        whole = run(process, algorithm, rounds=3)
        server, clients = run(process, algorithm, rounds=1)
        client_ids = tuple(str(index) for index in range(len(clients)))
        state = Checkpoint(
            round_number=1,
            server_state=server,
            client_ids=client_ids,
            client_states=clients,
            ledger=None,
            run_key=RunKey.from_entropy(),
            config_hash="hash",
        )
        save(tmp_path, state)
        loaded = load_latest(tmp_path)
        start = (loaded.server_state, loaded.client_states)
        assert_same(whole, run(process, algorithm, rounds=(2, 3), start=start))


def test_personal_weights_have_the_models_structure_and_train(algorithm, process, engine):
    with engine.install():
        server, clients = run(process, algorithm)
        weights = process.personalise(server, ready(process, algorithm, server, clients))
    initial = MODEL.init(0)
    assert len(weights) == len(SIZES)
    for one in weights:
        assert list(one) == list(initial)
        for name, array in initial.items():
            assert one[name].shape == array.shape
            assert np.isfinite(one[name]).all()
            assert not np.array_equal(one[name], array)


def test_evaluation_uses_the_personal_weights(algorithm, process, engine):
    with engine.install():
        server, clients = run(process, algorithm)
        clients = ready(process, algorithm, server, clients)
        weights = process.personalise(server, clients)
        metrics = process.evaluate(server, clients, client_data(1))
    for one, data, row in zip(weights, client_data(1), metrics, strict=True):
        x, y = tf.constant(data["x"][: data["num_examples"]]), tf.constant(data["y"][: data["num_examples"]])
        tensors = {name: tf.constant(array) for name, array in one.items()}
        accuracy = np.mean(np.argmax(MODEL.predict(tensors, x), axis=1) == y)
        # A count over a count; and a mean of losses, all positive, after two layers, an exponential and a logarithm.
        np.testing.assert_allclose(row["personal"]["accuracy"], accuracy, rtol=2 * gamma(2))
        losses = np.mean(MODEL.loss(tensors, x, y))
        np.testing.assert_allclose(row["personal"]["loss"], losses, rtol=2 * gamma(roundings(steps=1, rounds=1)))
        assert ("global" in row) == (algorithm.global_model is not None)


def test_only_what_is_declared_leaves_the_client_and_every_gradient_is_asked_for_once(algorithm):
    check_declarations(algorithm)


@pytest.mark.parametrize("rows", [0, 4])
def test_a_client_with_no_data_trains_on_noise_alone_like_any_other(algorithm, process, engine, rows):
    if algorithm.needs_plain_gradients:
        pytest.skip("has no noise to train on")
    empty = [
        collections.OrderedDict(
            x=np.full([rows, 2, 2, 1], math.nan, np.float32), y=np.zeros(rows, np.int64), num_examples=np.int32(0)
        )
    ] * len(SIZES)
    with engine.install():
        # Two rounds: the first of some methods measures norms and leaves the model as it is.
        server, clients = run(process, algorithm, 2, data=empty)
        weights = process.personalise(server, ready(process, algorithm, server, clients, data=empty))
        # One among others, too.
        among = run(process, algorithm, 1, data=[empty[0], *client_data()[1:]])
    assert all(np.isfinite(leaf).all() for leaf in leaves((server, clients, among)))
    for one in weights:
        assert not any(np.array_equal(one[name], array) for name, array in MODEL.init(0).items())


def test_no_coordinate_of_a_release_is_without_noise(algorithm):
    if not algorithm.released or algorithm.needs_plain_gradients:
        pytest.skip("releases nothing, or cannot be noised")
    check_noise(algorithm)


def test_no_noise_and_no_clip_equals_training_on_the_plain_gradient(algorithm, process, engine):
    """Up to rounding, with z = 0 and C = infinity: against the same algorithm on a gradient without any privacy."""

    def plain_gradient(weights, data, index, scale, pull=None, trainable=None):
        x, y = data.x[: data.num_examples], data.y[: data.num_examples]
        with tf.GradientTape() as tape:
            tape.watch(list(weights.values()))
            loss = tf.reduce_sum(MODEL.loss(weights, x, y))
        gradients = tape.gradient(loss, list(weights.values()))
        size = tf.cast(data.num_examples, tf.float32)
        scaled = collections.OrderedDict((name, g * (scale / size)) for name, g in zip(weights, gradients, strict=True))
        return split(scaled, trainable or scaled)[0]

    server_type = process.initialize.type_signature.result.member["algorithm"]
    client_type = process.init_client.type_signature.result.member
    params_type = client_params_type(algorithm, estimator_for(algorithm, MODEL))

    def select(message, data, params):
        if not algorithm.candidates:
            return tf.constant(NOTHING)
        stacked = tf.nest.map_structure(lambda leaf: leaf[tf.newaxis], (data, params))
        selector = build_selector(MODEL, loss_bound=1.0)
        return selector(algorithm.candidates(message), stacked[0], stacked[1]["selection_epsilon"], stacked[1]["seed"])[
            0
        ]

    # Through the same engine: another build of TensorFlow may round differently.
    @_tff.tensorflow_computation(server_type, client_type, client_data_type(MODEL), params_type)
    def reference(server, state, data, params):
        counts = {name: params["hparams"][name] for name in algorithm.step_hparams}
        selected = select(algorithm.broadcast(server), data, params)
        steps = {name: LocalSteps(count, count) for name, count in counts.items()}
        hparams = {**params["hparams"], **steps, "selected": selected}
        result = algorithm.client_update(
            algorithm.broadcast(server), state, ClientData(**data), plain_gradient, hparams
        )
        return collections.OrderedDict(result.state)

    params = client_params(algorithm, 1, noise_multiplier=0.0, clip_norm=math.inf, sampling_rate=1.0)
    with engine.install():
        server = process.initialize()
        state = process.init_client(server)
        _, clients, _ = process.next(server, [state] * len(SIZES), client_data(), params)
        expected = [
            reference(server["algorithm"], state, data, one) for data, one in zip(client_data(), params, strict=True)
        ]
    assert_close(list(clients), expected)
