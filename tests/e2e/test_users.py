"""Users on a small scale: raw data to served predictions; each has a model of its own, and no file names anyone."""

import numpy as np
import pytest
import tensorflow as tf

from beam_pipelines.sources.partition import write_digits_leaf
from serving.client.grpc_client import GrpcClient
from serving.client.rest_client import RestClient
from serving.server.embedded import EmbeddedServer
from serving.tf_serving import ServedModel
from tests.places import DEMO
from tests.rounding import ELEMENTARY, assert_within, gamma
from tff_pdp.experiment.build import experiment_engine
from tff_pdp.experiment.config import load_experiment
from tff_pdp.experiment.prepare import prepare_clients
from tff_pdp.personal_models.export import export_experiment
from tff_pdp.personal_models.model_card import exported_ids
from tff_pdp.personal_models.served import served_models
from tff_pdp.personal_models.trained_clients import trained_clients
from tff_pdp.training.evaluate import load_trained
from tff_pdp.training.train import train

pytestmark = pytest.mark.usefixtures("one_fresh_process")

NUM_USERS = 12
STEPS = {"learning_rate": 0.1, "local_steps": 2}
# One with heads that users tune before they use them, one whose models are made from descriptors.
METHODS = {
    "centaur": {**STEPS, "adapt_steps": 3},
    "udp_hypernet": {**STEPS, "hidden_units": [], "descriptor_learning_rate": 10.0},
}
# Relative, of a logit to the magnitudes of its terms: layers over 64 pixels and 8 units, with biases, each of weights
# that may be made of a descriptor of 8 values, by an inner product and a bias.
LOGIT = gamma((64 + 1) + (8 + 1) + 2 * (8 + 1))
# Relative, of a probability: a softmax over ten classes.
PROBABILITY = gamma(2 * ELEMENTARY + 10 + 2)
LAYOUTS = {"centaur": "stacked", "udp_hypernet": "hypernetwork"}


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    """A folder with a prepared client dataset, and both methods trained on it."""
    folder = tmp_path_factory.mktemp("users")
    write_digits_leaf(folder / "leaf", num_clients=NUM_USERS, concentration=5.0, seed=0)
    config = config_of(folder, "centaur")
    prepare_clients(config)
    for name in METHODS:
        train(config, name, progress=False)
    return folder


def config_of(folder, name):
    settings = {
        "output": str(folder),
        "data.input": str(folder / "leaf"),
        "model": {"kind": "mlp", "hidden_units": [8]},
        "privacy": {
            "kind": "user",
            "batch_size": 16,
            "clip_norm": 0.5,
            "users_per_round": 6,
            "budgets": {"kind": "one_for_all", "epsilon": 20.0, "delta": 1e-3},
        },
        "training.rounds": 4,
        "training.evaluate_every": 4,
        "training.client_parallelism": "loop",
        "algorithms": METHODS,
        "export.algorithm": name,
        "export.model_name": name,
        "export.layout": LAYOUTS[name],
        "tuning": {},
    }
    return load_experiment(DEMO, settings)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", METHODS)
def test_every_user_is_answered_by_its_own_model(output, name):
    config = config_of(output, name)
    exported = export_experiment(config)
    assert exported.layout == LAYOUTS[name]
    method, state = load_trained(config, name)
    with experiment_engine(config):
        weights = trained_clients(method, state).weights_by_id()
        shared = served_models(trained_clients(method, state)).references[""]
    state.client_states.close()
    users = list(method.clients.client_ids)
    assert len({tuple(own[method.model.head[0]].ravel()) for own in weights.values()}) >= NUM_USERS // 2

    # Unknown to the export: a stranger, nobody, and a user under its plain name.
    asked = [*users, "stranger", "", users[0]]
    own_id = exported_ids(config)
    ids = [*(own_id(user) for user in users), own_id("stranger"), "", users[0]]
    x = np.concatenate([method.clients.load(user, "test").x[:1] for user in users])
    x = np.concatenate([x, x[:3]])
    known = [True] * NUM_USERS + [False] * 3
    models = [weights[user] if is_known else shared for user, is_known in zip(asked, known, strict=True)]
    expected = np.concatenate([_answers(method.model, own, row[None]) for own, row in zip(models, x, strict=True)])
    # A probability changes by less than the logits do; served and expected ones are both rounded.
    logits = np.stack([_logit_magnitude(own, row) for own, row in zip(models, x, strict=True)])
    bounds = 2 * (PROBABILITY * expected + LOGIT * logits)
    with EmbeddedServer([ServedModel(name, config.export_folder)]) as server:
        rest = RestClient(f"127.0.0.1:{server.rest_port}").predict(name, ids, x)
        with GrpcClient(f"127.0.0.1:{server.grpc_port}") as client:
            grpc = client.predict(name, ids, x)
    for found in (rest, grpc):
        assert_within(found.answers, expected, bounds)
        assert found.personalized.tolist() == known


@pytest.mark.timeout(300)
def test_no_file_of_an_export_names_a_user(output):
    config = config_of(output, "centaur")
    version = export_experiment(config).version
    method, state = load_trained(config, "centaur")
    state.client_states.close()
    files = {path: path.read_bytes() for path in version.rglob("*") if path.is_file()}
    for user in method.clients.client_ids:
        assert [path for path, content in files.items() if user.encode() in content] == []
        # What is looked for would be found.
        assert any(exported_ids(config)(user).encode() in content for content in files.values())
    key = config.client_id_key.read_text().strip()
    assert not any(key.encode() in content or bytes.fromhex(key) in content for content in files.values())


def _logit_magnitude(weights, x):
    """Sums the magnitudes of all terms of the largest logit: `[1]`."""
    size = np.abs(x.ravel())
    for layer in range(2):
        kernel, bias = (np.abs(np.asarray(weights[f"dense_{layer}/{part}"])) for part in ("kernel", "bias"))
        size = size @ kernel + bias
    return size.max(keepdims=True)


def _answers(model, weights, x):
    return model.answers(model.predict(weights, tf.constant(x))).numpy()
