"""A client's training keeps its bits whoever else is computed with it, as guarantees of users take for granted."""

import collections

import numpy as np
import pytest

from tests.tiers import parameters
from tff_pdp.algorithms.minibatch import build_minibatch
from tff_pdp.engines.client_values import ClientValues
from tff_pdp.engines.running import build_engine
from tff_pdp.experiment.kinds import ALGORITHMS
from tff_pdp.models.convolutional import build_cnn
from tff_pdp.models.dense import build_linear, build_mlp
from tff_pdp.models.resnet import build_resnet20
from tff_pdp.processes.compose import client_data_type, client_params_columns, client_params_type, compose

NUM_CLASSES, NUM_EXAMPLES = 5, 24
MODELS = {
    "linear": lambda: build_linear((10,), NUM_CLASSES),
    "mlp": lambda: build_mlp((10,), NUM_CLASSES, (16,)),
    "cnn": lambda: build_cnn((12, 12, 1), NUM_CLASSES),
    "resnet": lambda: build_resnet20((8, 8, 3), NUM_CLASSES, 1, (8, 16)),
}
# A vector register of float32 numbers has four, eight or sixteen.
SIZES = (1, 2, 3, 5, 7, 16, 17)


def trained(process, algorithm, estimator, model, num_clients):
    """Weights of clients that each train alone, by name, all in one stack."""
    rows = []
    for client in range(num_clients):
        rng = np.random.default_rng(client)
        x = rng.normal(size=(NUM_EXAMPLES, *model.input_shape)).astype(np.float32)
        y = rng.integers(NUM_CLASSES, size=NUM_EXAMPLES)
        rows.append(collections.OrderedDict(x=x, y=y, num_examples=np.int32(NUM_EXAMPLES)))
    columns = client_params_columns(
        algorithm,
        estimator,
        mechanism={},
        hparams={"learning_rate": 0.1, "local_steps": 3},
        seeds=np.array([[7, client] for client in range(num_clients)], np.int64),
    )
    state = process.initialize()
    _, states, _ = process.next(
        state,
        [process.init_client(state)] * num_clients,
        ClientValues.from_members(client_data_type(model), rows).stack(),
        ClientValues.from_columns(client_params_type(algorithm, estimator), columns),
    )
    return {name: np.asarray(value) for name, value in states.columns()["weights"].items()}


FORMS = {"default": {}, "compiled": {"xla": "always"}, "batched convolutions": {"batched_convolutions": True}}


@pytest.mark.parametrize(
    ("name", "form"),
    parameters([(name, form) for name in MODELS for form in FORMS], test=[("mlp", "default")]),
)
def test_a_client_keeps_its_bits_in_stacks_of_every_size(name, form):
    model = MODELS[name]()
    algorithm, estimator = ALGORITHMS.find("local_only")(), build_minibatch(model, 8)
    with build_engine("inprocess", device="cpu", client_parallelism="vectorized", **FORMS[form]).install():
        process = compose(algorithm, model, estimator=estimator)
        whole = trained(process, algorithm, estimator, model, SIZES[-1])
        for size in SIZES[:-1]:
            found = trained(process, algorithm, estimator, model, size)
            for key, value in found.items():
                np.testing.assert_array_equal(value, whole[key][:size], err_msg=f"{key} in a stack of {size}")
