"""What every registered algorithm must do, whatever its method; a new entry is tested with no new code."""

import collections
import math

import numpy as np
import pytest
import tensorflow as tf

from tff_pdp import _tff
from tff_pdp.algorithms.base import ClientData, LocalSteps
from tff_pdp.models.mlp import build_mlp
from tff_pdp.processes.compose import AGGREGATORS, client_data_type, client_params_type, compose
from tff_pdp.registry import ALGORITHMS
from tff_pdp.runtime.checkpoint import Checkpoint, load_latest, save
from tff_pdp.runtime.run_key import RunKey

MODEL = build_mlp((2, 2, 1), 3, (4,))
SIZES = (6, 9, 4)
ROUNDS = 3


def client_data(seed=0):
    rng = np.random.default_rng(seed)
    return [
        collections.OrderedDict(
            x=rng.normal(size=(size, 2, 2, 1)).astype(np.float32),
            y=rng.integers(0, 3, size, dtype=np.int64),
            num_examples=np.int32(size),
        )
        for size in SIZES
    ]


def client_params(algorithm, round_number, noise_multiplier=1.0, clip_norm=1.0, sampling_rate=0.5, **hparams):
    key = RunKey.from_test_seed(5)
    values = {**algorithm.hparams, "local_steps": 2, **hparams}
    return [
        collections.OrderedDict(
            mechanism=collections.OrderedDict(
                clip_norm=np.float32(clip_norm),
                noise_multiplier=np.float32(noise_multiplier),
                sampling_rate=np.float32(sampling_rate),
                expected_batch_size=np.float32(sampling_rate * size),
            ),
            hparams=collections.OrderedDict(
                (name, (np.int32 if isinstance(default, int) else np.float32)(values[name]))
                for name, default in algorithm.hparams.items()
            ),
            seed=key.client_seed(round_number, f"client {index}"),
        )
        for index, size in enumerate(SIZES)
    ]


@pytest.fixture(scope="module", params=sorted(ALGORITHMS))
def algorithm(request):
    return ALGORITHMS[request.param]()


@pytest.fixture(scope="module")
def process(algorithm):
    return compose(algorithm, MODEL)


def run(process, algorithm, rounds=ROUNDS, start=None, **params):
    server, clients = start or (process.initialize(), None)
    first = 1
    if clients is None:
        clients = [process.init_client(server)] * len(SIZES)
    else:
        first, rounds = rounds
    for number in range(first, rounds + 1):
        server, clients, _ = process.next(server, clients, client_data(), client_params(algorithm, number, **params))
    return server, clients


def leaves(value):
    return [np.asarray(leaf) for leaf in tf.nest.flatten(value)]


def assert_same(first, second):
    for one, other in zip(leaves(first), leaves(second), strict=True):
        np.testing.assert_array_equal(one, other)


def test_it_is_registered_under_its_own_name(algorithm):
    assert ALGORITHMS[algorithm.name]().name == algorithm.name
    assert algorithm.data_passes >= 1
    assert "local_steps" in algorithm.hparams
    assert set(algorithm.released.values()) <= set(AGGREGATORS)


def test_same_seeds_give_the_same_bits(algorithm, process, native_engine):
    with native_engine.install():
        assert_same(run(process, algorithm), run(process, algorithm))


def test_a_round_keeps_types_and_shapes(algorithm, process, native_engine):
    with native_engine.install():
        server = process.initialize()
        client = process.init_client(server)
        new_server, new_clients = run(process, algorithm, rounds=1)
    for before, after in zip(leaves((server, client)), leaves((new_server, new_clients[0])), strict=True):
        assert (before.dtype, before.shape) == (after.dtype, after.shape)


def test_state_survives_a_checkpoint_and_training_goes_on_to_the_same_bits(algorithm, process, native_engine, tmp_path):
    with native_engine.install():
        whole = run(process, algorithm, rounds=3)
        server, clients = run(process, algorithm, rounds=1)
        client_ids = tuple(str(index) for index in range(len(clients)))
        save(tmp_path, Checkpoint(1, server, client_ids, clients, None, RunKey.from_entropy(), "hash"))
        loaded = load_latest(tmp_path)
        start = (loaded.server_state, loaded.client_states)
        assert_same(whole, run(process, algorithm, rounds=(2, 3), start=start))


def test_personal_weights_have_the_models_structure_and_train(algorithm, process, native_engine):
    with native_engine.install():
        server, clients = run(process, algorithm)
        weights = process.personalise(server, clients)
    initial = MODEL.init(0)
    for one in weights:
        assert list(one) == list(initial)
        for name, array in initial.items():
            assert one[name].shape == array.shape
            assert np.isfinite(one[name]).all()
            assert not np.array_equal(one[name], array)


def test_evaluation_uses_the_personal_weights(algorithm, process, native_engine):
    with native_engine.install():
        server, clients = run(process, algorithm)
        weights = process.personalise(server, clients)
        metrics = process.evaluate(server, clients, client_data(1))
    for one, data, row in zip(weights, client_data(1), metrics, strict=True):
        logits = MODEL.predict({name: tf.constant(array) for name, array in one.items()}, tf.constant(data["x"]))
        accuracy = np.mean(np.argmax(logits, axis=1) == data["y"])
        np.testing.assert_allclose(row["personal"]["accuracy"], accuracy)
        assert ("global" in row) == process.has_global_model


def test_only_what_is_declared_leaves_the_client(algorithm):
    initial = collections.OrderedDict((name, tf.constant(array)) for name, array in MODEL.init(0).items())
    message = algorithm.broadcast(algorithm.init_server(initial))
    result = algorithm.client_update(
        message,
        algorithm.init_client(message),
        ClientData(tf.zeros([1, 2, 2, 1]), tf.zeros([1], tf.int64)),
        lambda weights, data, step: weights,
        {name: tf.constant(value) for name, value in algorithm.hparams.items()},
    )
    assert set(result.released) == set(algorithm.released)


def test_a_client_with_no_data_trains_on_noise_alone_like_any_other(algorithm, process, native_engine):
    empty = [collections.OrderedDict(x=data["x"][:0], y=data["y"][:0]) for data in client_data()]
    with native_engine.install():
        server = process.initialize()
        clients = [process.init_client(server)] * len(SIZES)
        server, clients, _ = process.next(server, clients, empty, client_params(algorithm, 1))
    assert all(np.isfinite(leaf).all() for leaf in leaves((server, clients)))


def test_no_coordinate_of_a_release_is_without_noise(algorithm, native_engine):
    if not algorithm.released:
        pytest.skip("releases nothing")
    released = client_release(algorithm)
    draws = np.stack([np.concatenate([leaf.ravel() for leaf in released(number)]) for number in range(60)])
    assert (draws.std(axis=0) > 0).all()


def client_release(algorithm):
    """What one client releases in a round of one step, with the mechanism of the composed process."""
    from tff_pdp.privacy.dp_sgd import build_dp_sgd_grad_fn

    initial = collections.OrderedDict((name, tf.constant(array)) for name, array in MODEL.init(0).items())
    message = algorithm.broadcast(algorithm.init_server(initial))
    data = client_data()[0]

    @tf.function
    def release(params):
        grad_fn = build_dp_sgd_grad_fn(MODEL, seed=params["seed"], **params["mechanism"])
        examples = ClientData(tf.constant(data["x"]), tf.constant(data["y"]))
        return algorithm.client_update(
            message, algorithm.init_client(message), examples, grad_fn, params["hparams"]
        ).released

    def draw(number):
        params = client_params(algorithm, number, local_steps=1)[0]
        return leaves(release(tf.nest.map_structure(tf.constant, params)))

    return draw


def test_no_noise_and_no_clip_equals_training_on_the_plain_gradient(algorithm, process, native_engine):
    """To the bit: z = 0 and C = infinity, against the same algorithm on a gradient that knows nothing of privacy."""

    def plain_gradient(weights, data, step):
        with tf.GradientTape() as tape:
            tape.watch(list(weights.values()))
            loss = tf.reduce_sum(MODEL.loss(weights, data.x, data.y))
        gradients = tape.gradient(loss, list(weights.values()))
        size = tf.cast(tf.shape(data.y)[0], tf.float32)
        return collections.OrderedDict((name, g / size) for name, g in zip(weights, gradients, strict=True))

    server_type = process.initialize.type_signature.result.member["algorithm"]
    client_type = process.init_client.type_signature.result.member

    # Through the same engine: another build of TensorFlow may round differently.
    @_tff.tensorflow_computation(server_type, client_type, client_data_type(MODEL), client_params_type(algorithm))
    def reference(server, state, data, params):
        result = algorithm.client_update(
            algorithm.broadcast(server), state, ClientData(**data), plain_gradient, params["hparams"]
        )
        return collections.OrderedDict(result.state)

    params = client_params(algorithm, 1, noise_multiplier=0.0, clip_norm=math.inf, sampling_rate=1.0)
    with native_engine.install():
        server = process.initialize()
        state = process.init_client(server)
        _, clients, _ = process.next(server, [state] * len(SIZES), client_data(), params)
        for client, data, one in zip(clients, client_data(), params, strict=True):
            assert_same(client, reference(server["algorithm"], state, data, one))
