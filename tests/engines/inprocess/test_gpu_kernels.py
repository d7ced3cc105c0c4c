"""Steps of stacked clients, traced as for a GPU, have no operation that a GPU has no kernel for."""

import pytest
import tensorflow as tf

from tests.engines.inprocess.gpu_kernels import without_kernel
from tff_pdp.algorithms.minibatch import build_minibatch
from tff_pdp.engines.inprocess import steps
from tff_pdp.engines.inprocess.clients import Lanes
from tff_pdp.engines.inprocess.execution import LoadedProgram
from tff_pdp.engines.inprocess.graphs import tracing
from tff_pdp.experiment.kinds import ALGORITHMS
from tff_pdp.models.convolutional import build_cnn
from tff_pdp.models.dense import build_linear_regression, build_mlp
from tff_pdp.privacy.mechanisms import random_bits, sampling
from tff_pdp.privacy.mechanisms.dp_sgd import build_dp_sgd
from tff_pdp.privacy.mechanisms.user_noise import FixedClip, UserSum
from tff_pdp.processes.compose import compose

CNN, MLP, LINEAR = build_cnn((28, 28, 1), 10), build_mlp((784,), 10, (200,)), build_linear_regression((28,))
USERS = UserSum(FixedClip(), 0.5)
WORK = {
    "a CNN's plain steps": ("fed_avg", CNN, build_minibatch(CNN, 10), None),
    "a perceptron's plain steps": ("fed_avg", MLP, build_minibatch(MLP, 10), None),
    "a perceptron's update as a record": ("fed_avg", MLP, build_minibatch(MLP, 10), USERS),
    "DP-SGD of a small model": ("mr_mtl", LINEAR, build_dp_sgd(LINEAR), None),
    "DP-SGD of a CNN": ("mr_mtl", CNN, build_dp_sgd(CNN), None),
}


def client_steps(monkeypatch, name, *, is_gpu_visible):
    """The steps of stacked clients in a round, as traced functions; nothing is run."""
    for module in (random_bits, sampling):
        monkeypatch.setattr(module, "gpu_is_visible", lambda: is_gpu_visible)
    traced = []

    def trace(function, specs):
        def within_scope(*leaves):
            with tracing(tf.compat.v1.get_default_graph()):
                return function(*leaves)

        traced.append(tf.function(within_scope, autograph=False).get_concrete_function(*specs))

    monkeypatch.setattr(steps, "trace", trace)
    algorithm, model, estimator, user_sum = WORK[name]
    process = compose(ALGORITHMS.find(algorithm)(), model, estimator=estimator, user_sum=user_sum)
    program = LoadedProgram(process.next, Lanes("/CPU:0"))
    for number, level in enumerate(program.program.levels):
        if level.clients or level.aggregations:
            program._client_step(number, "vectorized")
    return traced


@pytest.mark.parametrize("name", WORK)
def test_steps_for_a_gpu_have_kernels_there(name, monkeypatch):
    traced = client_steps(monkeypatch, name, is_gpu_visible=True)
    assert traced
    assert [without_kernel(step) for step in traced] == [[]] * len(traced)


def test_steps_for_a_cpu_are_other_ones(monkeypatch):
    """The form for CPUs has what a GPU lacks; so the test above can fail."""
    (step,) = client_steps(monkeypatch, "DP-SGD of a small model", is_gpu_visible=False)
    missing = without_kernel(step)
    assert {"RaggedTensorToTensor", "SplitV", "StatelessRandomUniformFullIntV2"} & {one for one, _ in missing}
    assert ("TensorListStack", "uint32") in missing


def test_an_unknown_operation_has_no_kernel():
    step = tf.function(lambda x: tf.linalg.inv(x) + 1).get_concrete_function(tf.zeros([2, 2]))
    assert without_kernel(step) == [("MatrixInverse", "float32")]


def test_operations_that_no_result_needs_do_not_count():
    def unused(x):
        tf.linalg.inv(x)
        return x + 1

    assert without_kernel(tf.function(unused, autograph=False).get_concrete_function(tf.zeros([2, 2]))) == []
