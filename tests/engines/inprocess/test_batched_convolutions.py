"""Clients of convolutional models in stacks: the batched form has the results of the loop, without its operations."""

import collections
import inspect

import numpy as np
import pytest

from tests.engines.inprocess.inprocess_support import inprocess
from tests.live_operations import live_operations
from tests.tiers import parameters
from tff_pdp.algorithms.minibatch import build_minibatch
from tff_pdp.engines.client_values import ClientValues
from tff_pdp.experiment.kinds import ALGORITHMS
from tff_pdp.models.convolutional import build_cnn, build_tutorial_cnn
from tff_pdp.models.resnet import build_resnet20
from tff_pdp.privacy.mechanisms.dp_sgd import build_dp_sgd
from tff_pdp.processes.compose import client_data_type, client_params_columns, client_params_type, compose

NUM_CLASSES, NUM_EXAMPLES = 5, 12
MODELS = {
    "cnn": lambda: build_cnn((8, 8, 1), NUM_CLASSES, (3, 4), 3, 6),
    "cnn, padded": lambda: build_cnn((9, 9, 2), NUM_CLASSES, (3, 4), 5, 6, pool_after="each", padding="same"),
    "strided": lambda: build_tutorial_cnn((13, 13, 1), NUM_CLASSES),
    "emnist": lambda: build_cnn((28, 28, 1), 62),
    "resnet": lambda: build_resnet20((8, 8, 3), NUM_CLASSES, 1, (8, 16)),
}
MECHANISM = {"clip_norm": 0.5, "noise_multiplier": 0.0, "sampling_rate": 0.6, "expected_batch_size": 7.0}
ESTIMATORS = {"minibatch": lambda model: build_minibatch(model, 4), "dp_sgd": build_dp_sgd}
LOOPS = ("While", "StatelessWhile")
CONVOLUTIONS = {"Conv2D", "Conv2DBackpropInput", "Conv2DBackpropFilter"}


def one_round(engine, model, estimator, num_clients=3, local_steps=3):
    """The clients' weights after a round of `mr_mtl`, and the stack's traced function."""
    algorithm = ALGORITHMS.find("mr_mtl")()
    with engine.install():
        process = compose(algorithm, model, estimator=estimator)
        rows = []
        for client in range(num_clients):
            rng = np.random.default_rng(client)
            x = rng.normal(size=(NUM_EXAMPLES, *model.input_shape)).astype(np.float32)
            y = rng.integers(model.num_classes, size=NUM_EXAMPLES)
            rows.append(collections.OrderedDict(x=x, y=y, num_examples=np.int32(NUM_EXAMPLES - client)))
        columns = client_params_columns(
            algorithm,
            estimator,
            mechanism={name: MECHANISM[name] for name in estimator.mechanism},
            hparams={"learning_rate": 0.1, "local_steps": local_steps, "prox_weight": 0.1},
            seeds=np.array([[7, client] for client in range(num_clients)], np.int64),
        )
        state = process.initialize()
        _, states, _ = process.next(
            state,
            [process.init_client(state)] * num_clients,
            ClientValues.from_members(client_data_type(model), rows).stack(),
            ClientValues.from_columns(client_params_type(algorithm, estimator), columns),
        )
        program = list(engine._programs.values())[-1]
        weights = [np.asarray(each) for each in states.columns()["weights"].values()]
    step = program._client_steps[0, program.mode, program.has_batched_convolutions]
    return weights, inspect.getclosurevars(step.function).nonlocals["concrete"]


@pytest.mark.parametrize(
    ("name", "estimator"),
    parameters(
        [(name, estimator) for name in MODELS for estimator in ESTIMATORS],
        test=[("cnn", "minibatch"), ("cnn", "dp_sgd")],
    ),
)
def test_a_round_has_the_weights_of_the_loop_over_clients_and_no_such_loop(name, estimator):
    """The numbers of clients and of examples are not known in the graph, so the graph is that of any stack."""
    model = MODELS[name]()
    found = {}
    for is_batched in (False, True):
        with inprocess("vectorized", device="cpu", batched_convolutions=is_batched) as engine:
            found[is_batched] = one_round(engine, model, ESTIMATORS[estimator](model))
    (loop, of_loop), (batched, of_batched) = ((weights, live_operations(each)) for weights, each in found.values())
    for expected, weights in zip(loop, batched, strict=True):
        np.testing.assert_allclose(weights, expected, rtol=0, atol=1e-6)
    assert of_loop["Conv2D"]
    assert not CONVOLUTIONS & set(of_batched)
    if estimator == "minibatch":
        # The loop over the local steps. Lists of tensors would be what a loop over clients writes.
        assert sum(of_batched[name] for name in LOOPS) == 1 < sum(of_loop[name] for name in LOOPS)
        assert not {"TensorListSetItem", "TensorListStack"} & set(of_batched)
