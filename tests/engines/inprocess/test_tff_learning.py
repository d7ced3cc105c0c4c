"""TFF's own learning algorithms on the in-process engine: state and metrics as on the native engine.

Secure sums are simulated: no cryptography exists in TFF's wheels. The in-process engine computes them in the clear; for
the native engine, which cannot run them at all, the tests put the same plain sums in their place.

Clients hold data sets, so they are computed one by one.
"""

import collections
import functools
import itertools

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tests.engines.engine_equality import assert_same, largest_float
from tests.engines.inprocess.inprocess_support import inprocess
from tests.rounding import standard_errors
from tests.tiers import parameters
from tff_pdp import _tff

NUM_CLIENTS = 3
ROUNDS = 2
ELEMENT = collections.OrderedDict(
    x=tf.TensorSpec([None, 4], tf.float32, name="x"), y=tf.TensorSpec([None], tf.int32, name="y")
)
# Roundings in a row. In a step: inner products forwards and backwards through two layers and the norm of all weights,
# none longer than the 43 weights, a sum over a batch of four, and some 64 for elementary functions and the update. A
# client takes three steps, twice in reconstruction, and a round ends with sums over clients.
A_STEP = 6 * 43 + 4 + 64
TRAINING = ROUNDS * (2 * 3 * A_STEP + NUM_CLIENTS)
ITERATOR = tff.learning.LoopImplementation.DATASET_ITERATOR
LOSS = functools.partial(tf.keras.losses.SparseCategoricalCrossentropy, from_logits=True)
sgd = tff.learning.optimizers.build_sgdm
DP = _tff.DifferentiallyPrivateFactory


def client_data():
    rng = np.random.default_rng(0)
    centers = rng.normal(size=(3, 4))
    clients = []
    for size in (7, 3, 10):
        y = rng.integers(0, 3, size, dtype=np.int32)
        x = (centers[y] + rng.normal(size=(size, 4))).astype(np.float32)
        clients.append(tf.data.Dataset.from_tensor_slices(collections.OrderedDict(x=x, y=y)).batch(4))
    return clients


def keras_layers():
    first, second = (tf.keras.initializers.GlorotUniform(seed) for seed in (1, 2))
    return [
        tf.keras.layers.InputLayer([4]),
        tf.keras.layers.Dense(5, tf.nn.tanh, kernel_initializer=first),
        tf.keras.layers.Dense(3, kernel_initializer=second),
    ]


def keras_metrics():
    return [tf.keras.metrics.SparseCategoricalAccuracy(), tff.learning.metrics.NumExamplesCounter()]


def keras_model():
    return tff.learning.models.from_keras_model(
        tf.keras.Sequential(keras_layers()), LOSS(), input_spec=ELEMENT, metrics=keras_metrics()
    )


@functools.cache
def functional_model():
    return tff.learning.models.functional_model_from_keras(
        tf.keras.Sequential(keras_layers()),
        LOSS(),
        input_spec=ELEMENT,
        metrics_constructor=lambda: collections.OrderedDict(accuracy=tf.keras.metrics.SparseCategoricalAccuracy()),
    )


def reconstruction_model():
    layers = keras_layers()
    return tff.learning.models.ReconstructionModel.from_keras_model_and_layers(
        tf.keras.Sequential(layers), global_layers=layers[1:2], local_layers=layers[2:], input_spec=ELEMENT
    )


def fed_avg(model, aggregator=None, server=None, **options):
    return tff.learning.algorithms.build_weighted_fed_avg(
        model, sgd(0.2), server or sgd(1.0), model_aggregator=aggregator, **options
    )


def unweighted_fed_avg(aggregator):
    return tff.learning.algorithms.build_unweighted_fed_avg(
        functional_model(), sgd(0.2), sgd(1.0), model_aggregator=aggregator
    )


def split_for_reconstruction():
    return tff.learning.models.ReconstructionModel.build_dataset_split_fn(recon_epochs=2)


def fed_recon():
    return tff.learning.algorithms.build_fed_recon(
        reconstruction_model,
        loss_fn=LOSS,
        metrics_fn=keras_metrics,
        server_optimizer_fn=sgd(1.0),
        client_optimizer_fn=sgd(0.2),
        reconstruction_optimizer_fn=sgd(0.3),
        dataset_split_fn=split_for_reconstruction(),
    )


def record_specs():
    return tuple(tf.TensorSpec(shape, tf.float32) for shape in ([4, 5], [5], [5, 3], [3]))


def with_plain_sums(computation):
    """The computation with plain sums in place of secure ones, as the native engine can run it."""
    replaced = _tff.replace_secure_intrinsics(computation)
    return tff.framework.ConcreteComputation.with_type(replaced, computation.type_signature)


ALGORITHMS = {
    "FedAvg": lambda: fed_avg(functional_model(), server=sgd(1.0, momentum=0.9)),
    "FedAvg, iterator": lambda: fed_avg(functional_model(), loop_implementation=ITERATOR),
    "FedAvg, Keras": lambda: fed_avg(keras_model),
    # Adam divides by the root of a second moment plus epsilon. At the default of 1e-7, a gradient near zero turns the
    # rounding of its last bit into a different step; at this one, it does not.
    "FedAvg, Adam": lambda: fed_avg(functional_model(), server=tff.learning.optimizers.build_adam(0.01, epsilon=1e-3)),
    "FedProx": lambda: tff.learning.algorithms.build_weighted_fed_prox(functional_model(), 0.5, sgd(0.2), sgd(1.0)),
    "FedSGD": lambda: tff.learning.algorithms.build_fed_sgd(functional_model(), sgd(0.5)),
    "FedRecon": fed_recon,
    "robust": lambda: fed_avg(functional_model(), tff.learning.robust_aggregator()),
    "secure": lambda: fed_avg(functional_model(), tff.learning.secure_aggregator()),
    # With a functional model TFF fails to build it: default value ranges that are tuples.
    "secure metrics": lambda: fed_avg(keras_model, metrics_aggregator=tff.learning.metrics.secure_sum_then_finalize),
    "DP, fixed clip": lambda: unweighted_fed_avg(DP.gaussian_fixed(0.0, NUM_CLIENTS, clip=0.05)),
    "DP, adaptive clip": lambda: unweighted_fed_avg(DP.gaussian_adaptive(0.0, NUM_CLIENTS)),
    "DP, dp_aggregator": lambda: unweighted_fed_avg(tff.learning.dp_aggregator(0.0, NUM_CLIENTS)),
    # The noise of a tree comes from a seed in the state, so with a seed that is given it is the same on both engines.
    "DP, tree": lambda: unweighted_fed_avg(DP.tree_aggregation(0.1, NUM_CLIENTS, 0.05, record_specs(), noise_seed=4)),
    "DP, adaptive tree": lambda: unweighted_fed_avg(
        DP.tree_adaptive(0.0, NUM_CLIENTS, record_specs(), clipped_count_stddev=0.0)
    ),
}
SECURE = {"secure", "secure metrics"}
# Its state holds seeds taken from the clock.
WITHOUT_STATE = {"DP, adaptive tree"}


@pytest.fixture
def engine():
    with inprocess("loop") as built:
        yield built


# One of each form: momentum at the server, two models, noise from a state.
COVERING = {"FedAvg", "FedRecon", "DP, tree"}


@pytest.mark.parametrize("name", parameters(ALGORITHMS, test=COVERING))
def test_training_is_the_same_as_on_the_native_engine(name, engine, native_engine):
    process = ALGORITHMS[name]()

    def train(next_round):
        state, outputs = process.initialize(), []
        for _ in range(ROUNDS):
            state, metrics = next_round(state, client_data())
            outputs.append((state.global_model_weights if name in WITHOUT_STATE else state, metrics))
        return outputs

    with native_engine.install():
        expected = train(with_plain_sums(process.next) if name in SECURE else process.next)
    with engine.install():
        share = assert_same(train(process.next), expected, TRAINING, largest_float(expected))
        print(f"{name}: {share:.2g}")


EVALUATIONS = {
    "functional": lambda: tff.learning.algorithms.build_fed_eval(functional_model()),
    "Keras": lambda: tff.learning.algorithms.build_fed_eval(keras_model),
    "Keras, iterator": lambda: tff.learning.algorithms.build_fed_eval(keras_model, loop_implementation=ITERATOR),
    "FedRecon": lambda: tff.learning.algorithms.build_fed_recon_eval(
        reconstruction_model,
        loss_fn=LOSS,
        metrics_fn=keras_metrics,
        reconstruction_optimizer_fn=sgd(0.3),
        dataset_split_fn=split_for_reconstruction(),
    ),
}


@pytest.mark.parametrize("name", parameters(EVALUATIONS, test=["Keras", "FedRecon"]))
def test_evaluation_is_the_same_as_on_the_native_engine(name, engine, native_engine):
    process = EVALUATIONS[name]()

    def evaluate():
        state = process.initialize()
        weights = process.get_model_weights(state)
        given = [np.cos(np.arange(np.size(w), dtype=np.float32)).reshape(np.shape(w)) for w in weights.trainable]
        state = process.set_model_weights(state, tff.learning.models.ModelWeights(given, weights.non_trainable))
        return process.next(state, client_data()).metrics

    with native_engine.install():
        expected = evaluate()
    with engine.install():
        print(f"{name}: {assert_same(evaluate(), expected, A_STEP, largest_float(expected)):.2g}")


def test_k_means_is_the_same_as_on_the_native_engine(engine, native_engine):
    process = tff.learning.algorithms.build_fed_kmeans(3, (4,), random_seed=(1, 2))
    data = [examples.unbatch().map(lambda example: example["x"]) for examples in client_data()]

    def cluster():
        state = process.initialize()
        for _ in range(ROUNDS):
            output = process.next(state, data)
            state = output.state
        return output

    with native_engine.install():
        expected = cluster()
    with engine.install():
        print(f"k-means: {assert_same(cluster(), expected, ROUNDS * A_STEP, largest_float(expected)):.2g}")


# Noise
# -----


def test_noise_has_its_size_and_is_never_the_same(mode):
    process = DP.gaussian_fixed(1.0, 4, clip=0.5).create(_tff.TensorType(np.float32, [20000]))
    with inprocess(mode) as engine, engine.install():
        state = process.initialize()
        draws = [np.asarray(process.next(state, [np.zeros(20000, np.float32)] * 4).result) for _ in range(3)]
    # 0.5 over 4 clients. Of three draws a deviation each, whose standard error is 1 / sqrt(2 n) of it, a mean and, of
    # pairs, correlations.
    errors = standard_errors(3 * 3) / np.sqrt(20000)
    for draw in draws:
        assert draw.std() == pytest.approx(0.125, rel=errors / np.sqrt(2))
        assert draw.mean() == pytest.approx(0, abs=errors * 0.125)
    for one, other in itertools.combinations(draws, 2):
        assert (one == other).mean() < 1e-3
        assert abs(np.corrcoef(one, other)[0, 1]) < errors


@pytest.mark.all
def test_distributed_noise_and_rounding_leave_the_mean(engine):
    # Clients round and add noise at random, so two engines cannot agree to the last digit. With `zeroing` the
    # computation is nested too deeply for TFF itself: protobuf refuses to parse it, whatever the engine.
    aggregator = tff.learning.ddp_secure_aggregator(1e-4, NUM_CLIENTS, zeroing=False)
    process = aggregator.create(_tff.to_type([_tff.TensorType(np.float32, [4])]))
    values = [[np.full(4, 0.01 * number, np.float32)] for number in range(NUM_CLIENTS)]
    with engine.install():
        (mean,) = process.next(process.initialize(), values).result
    # The sum's noise is 1e-4 of a clip norm of 0.1. Each client rounds at random to a grid of 20 bits across the range
    # of a sum, 2 * 3.9 deviations of 0.1 * 3 / sqrt(4): with a standard deviation of half a step at most.
    rounding = 2 * 3.9 * 0.15 / 2**20 / 2
    error = np.hypot(1e-4 * 0.1, np.sqrt(NUM_CLIENTS) * rounding) / NUM_CLIENTS
    assert np.asarray(mean) == pytest.approx(np.full(4, 0.01), abs=standard_errors(4) * error)


# Analytics
# ---------


def test_a_histogram_is_the_same_as_on_the_native_engine(engine, native_engine):
    process = tff.analytics.build_hierarchical_histogram_process(0.0, 10.0, 4, max_records_per_user=3)
    records = [[1.0, 2.0, 9.0], [5.0], [7.0, 7.0]]

    def count(next_round):
        return next_round(process.initialize(), records)[0].aggregated_hierarchical_histogram

    with native_engine.install():
        expected = count(with_plain_sums(process.next))
    with engine.install():
        assert_same(count(process.next), expected)


@pytest.mark.all
def test_heavy_hitters_are_the_same_as_on_the_native_engine(engine, native_engine):
    find = tff.analytics.heavy_hitters.iblt.build_iblt_computation(
        capacity=10, string_max_bytes=10, max_words_per_user=4, seed=3, batch_size=1
    )
    words = [tf.data.Dataset.from_tensor_slices(text.split()).batch(1) for text in ("a b a", "b c", "c b")]

    def count(find_words):
        found = find_words(words)
        # In no fixed order.
        hitters = zip(found.heavy_hitters, found.heavy_hitters_unique_counts, found.heavy_hitters_counts, strict=True)
        return int(found.clients), {word: (int(clients), int(times)) for word, clients, times in hitters}

    with native_engine.install():
        expected = count(with_plain_sums(find))
    with engine.install():
        assert count(find) == expected == (3, {b"a": (1, 2), b"b": (3, 3), b"c": (2, 2)})
