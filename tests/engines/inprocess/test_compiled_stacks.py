"""Work of stacked clients that XLA compiles: its results, its record, and how an engine does without XLA."""

import collections

import numpy as np
import pytest
import tensorflow as tf

from tests.engines.inprocess.inprocess_support import VECTOR, inprocess, messages_of, vectors
from tests.live_operations import live_operations
from tff_pdp import _tff
from tff_pdp.algorithms.minibatch import build_minibatch
from tff_pdp.engines.client_values import ClientValues
from tff_pdp.engines.inprocess.graphs import Graph, tracing
from tff_pdp.engines.inprocess.program import fingerprint, lower
from tff_pdp.errors import EngineError
from tff_pdp.experiment.kinds import ALGORITHMS
from tff_pdp.models.convolutional import build_cnn
from tff_pdp.models.dense import build_mlp
from tff_pdp.privacy.mechanisms.dp_sgd import build_dp_sgd
from tff_pdp.processes import vectorizable
from tff_pdp.processes.compose import client_data_type, client_params_columns, client_params_type, compose
from tff_pdp.processes.vectorizable import map_stack

pytestmark = pytest.mark.timeout(300)

NUM_CLASSES, NUM_EXAMPLES = 5, 12
MECHANISM = {"clip_norm": 0.5, "noise_multiplier": 1.0, "sampling_rate": 0.6, "expected_batch_size": 7.0}


def at_clients(function):
    """Clients' work that XLA may compile."""
    attached = vectorizable.vectorizable(
        function, lambda stack: map_stack(function, stack, may_compile=True), num_shared=0
    )

    @_tff.federated_computation(_tff.at_clients(VECTOR))
    def compute(x):
        return _tff.federated_map(_tff.tensorflow_computation(lambda own: attached(own), VECTOR), x)

    return compute


def two_rounds(engine, model, estimator, num_clients):
    """The clients' weights after two rounds of `mr_mtl`."""
    algorithm = ALGORITHMS.find("mr_mtl")()
    with engine.install():
        process = compose(algorithm, model, estimator=estimator)
        rows = []
        for client in range(num_clients):
            rng = np.random.default_rng(client)
            x = rng.normal(size=(NUM_EXAMPLES, *model.input_shape)).astype(np.float32)
            y = rng.integers(model.num_classes, size=NUM_EXAMPLES)
            rows.append(collections.OrderedDict(x=x, y=y, num_examples=np.int32(NUM_EXAMPLES - client % 3)))
        columns = client_params_columns(
            algorithm,
            estimator,
            mechanism={name: MECHANISM[name] for name in estimator.mechanism},
            hparams={"learning_rate": 0.1, "local_steps": 3, "prox_weight": 0.1},
            seeds=np.array([[7, client] for client in range(num_clients)], np.int64),
        )
        state = process.initialize()
        states = [process.init_client(state)] * num_clients
        data = ClientValues.from_members(client_data_type(model), rows).stack()
        params = ClientValues.from_columns(client_params_type(algorithm, estimator), columns)
        for _ in range(2):
            state, states, _ = process.next(state, states, data, params)
        return {name: np.asarray(value) for name, value in states.columns()["weights"].items()}


@pytest.mark.parametrize(
    ("build", "num_clients"),
    [
        pytest.param(lambda: build_mlp((6,), NUM_CLASSES, (7,)), 17, id="mlp"),
        pytest.param(lambda: build_cnn((8, 8, 1), NUM_CLASSES, (3, 4), 3, 6), 3, id="cnn"),
    ],
)
def test_compiled_rounds_have_the_weights_of_rounds_without_xla(build, num_clients):
    """A stack of 17 clients is compiled for 18."""
    found, choices = [], {}
    for xla in ("never", "always"):
        model = build()
        with inprocess("vectorized", device="cpu", xla=xla, choices=choices) as engine:
            assert not choices
            found.append(two_rounds(engine, model, build_minibatch(model, 4), num_clients))
    assert list(choices.values()) == ["compiled"]
    for name, expected in found[0].items():
        assert len(expected) == num_clients
        np.testing.assert_allclose(found[1][name], expected, rtol=0, atol=1e-6, err_msg=name)


def test_work_with_dp_sgd_is_never_compiled():
    """Its guarantee counts roundings as they are written, and XLA may compute one number twice with other roundings."""
    found, choices = [], {}
    for xla in ("never", "always"):
        model = build_mlp((6,), NUM_CLASSES, (7,))
        with inprocess("vectorized", device="cpu", xla=xla, choices=choices) as engine:
            found.append(two_rounds(engine, model, build_dp_sgd(model), 2))
            assert not any(program.is_compiled for program in engine._programs.values())
    assert not choices
    for name, expected in found[0].items():
        np.testing.assert_array_equal(found[1][name], expected, err_msg=name)


def dawson(x):
    # XLA has no kernel for it.
    return tf.raw_ops.Dawsn(x=x) + 1.0


def test_without_a_kernel_of_xla_the_engine_warns_and_does_without(caplog):
    choices = {}
    compute = at_clients(dawson)
    with (
        caplog.at_level("WARNING", "tff_pdp"),
        inprocess("vectorized", xla="always", choices=choices) as engine,
        engine.install(),
    ):
        for _ in range(2):
            found = np.stack(list(compute(vectors(4))))
    np.testing.assert_allclose(found, dawson(np.stack(vectors(4))).numpy(), rtol=1e-6)
    (message,) = messages_of(caplog)
    assert message.startswith("XLA does not compile clients' work: ")
    assert "Dawsn" in message
    assert choices == {fingerprint(lower(compute)): "vectorized"}


def test_a_run_that_began_with_xla_does_not_go_on_without():
    """Its rounds would be repeated with other roundings and the same noise, which would reveal what the noise hides."""
    compute = at_clients(dawson)
    choices = {fingerprint(lower(compute)): "compiled"}
    with (
        inprocess("vectorized", xla="always", choices=choices) as engine,
        engine.install(),
        pytest.raises(EngineError, match="XLA compiled a computation before"),
    ):
        compute(vectors(4))


def test_data_that_fail_do_not_count_as_a_failure_of_xla():
    def checked(stack):
        stack = tf.debugging.check_numerics(stack, "not a number")
        return map_stack(lambda x: 2 * x, stack, may_compile=True)

    attached = vectorizable.vectorizable(
        lambda x: 2 * tf.debugging.check_numerics(x, "not a number"), checked, num_shared=0
    )

    @_tff.federated_computation(_tff.at_clients(VECTOR))
    def compute(x):
        return _tff.federated_map(_tff.tensorflow_computation(lambda own: attached(own), VECTOR), x)

    choices = {}
    with inprocess("vectorized", xla="always", choices=choices) as engine, engine.install():
        compute(vectors(4))
        with pytest.raises(tf.errors.InvalidArgumentError, match="not a number"):
            compute([np.full(3, np.nan, np.float32)] * 4)
    assert list(choices.values()) == ["compiled"]


def test_auto_times_stacks_with_and_without_xla(monkeypatch):
    compute = at_clients(lambda x: tf.tanh(x) + 1.0)
    timed = {}
    with inprocess("auto", xla="always") as engine, engine.install():
        program = engine.load(compute)
        compare = program.compare
        monkeypatch.setattr(program, "compare", lambda *given: timed.update(compare(*given)) or timed)
        found = np.stack(list(compute(vectors(4))))
    assert set(timed) == {"loop", "vectorized", "compiled"}
    assert engine.choices == {program.fingerprint: min(timed, key=timed.get)}
    np.testing.assert_allclose(found, np.tanh(np.stack(vectors(4))) + 1, atol=1e-6)


def test_a_cpu_compiles_nothing_by_default():
    choices = {}
    with inprocess("vectorized", device="cpu", choices=choices) as engine, engine.install():
        compute = at_clients(lambda x: 2 * x)
        compute(vectors(4))
        assert not engine.load(compute).is_compiled
    assert not choices


@pytest.mark.parametrize(("num_clients", "compiled_for"), [(1, 1), (16, 16), (17, 18), (32, 32), (33, 36), (100, 104)])
def test_xla_compiles_for_few_numbers_of_clients(num_clients, compiled_for):
    places = vectorizable._compiled_places(tf.constant(num_clients)).numpy()
    np.testing.assert_array_equal(places, np.minimum(np.arange(compiled_for), num_clients - 1))


def test_an_imported_graph_has_no_placeholders_of_its_own():
    """XLA has no kernel for a placeholder, not even for one that nothing reads."""
    computation = _tff.tensorflow_computation(lambda x, y: (x * y, y), [VECTOR, VECTOR])

    @tf.function(jit_compile=True, autograph=False)
    def call(x, y):
        with tracing(tf.compat.v1.get_default_graph()):
            return Graph(computation.to_compiled_building_block())([x, y])

    x, y = vectors(2)
    product, same = call(x, y)
    np.testing.assert_allclose(product, x * y, rtol=1e-6)
    np.testing.assert_array_equal(same, y)
    concrete = call.get_concrete_function(tf.TensorSpec([3]), tf.TensorSpec([3]))
    names = [operation.name for operation in concrete.graph.get_operations() if operation.type == "Placeholder"]
    assert names == [tensor.op.name for tensor in concrete.inputs]
    assert live_operations(concrete)["Mul"] == 1
