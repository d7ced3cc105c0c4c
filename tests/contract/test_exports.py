"""What every registered algorithm trained is what its export answers: for each client, for strangers, for nobody."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from serving.export.exporter import export_models
from serving.export.versions import hold
from serving.models import CLUSTERS, GLOBAL_ROW, HYPERNETWORK, STACKED
from serving.saved_model.servable import load_servable
from tests.contract.contract_support import build
from tests.rounding import gamma
from tests.tiers import parameters
from tff_pdp.experiment.kinds import ALGORITHMS
from tff_pdp.personal_models.served import served_models
from tff_pdp.personal_models.trained_clients import TrainedClients
from tff_pdp.processes.client_work import what_clients_own
from tff_pdp.testing.algorithms import MODEL, ROUNDS, SIZES, ready, run

IDS = [f"client {index}" for index in range(len(SIZES))]
# One of each layout, of what is owned in it, and of what becomes of states before they are used.
EXPORTED = ("fed_avg", "mr_mtl", "ifca", "centaur", "dp_fed_avg_ft", "udp_hypernet")


@pytest.fixture(scope="module")
def loop(engines):
    """One engine is enough: that all give the same is a test of its own."""
    return engines["loop"]


@functools.cache
def trained_clients(name):
    """Clients after some rounds, and the weights that `personalise` gives them."""
    algorithm, process = build(name)
    server, clients = run(process, algorithm)
    states = list(ready(process, algorithm, server, clients))
    shared = algorithm.global_model
    return TrainedClients(
        model=MODEL,
        algorithm=algorithm,
        server_state=server["algorithm"],
        client_ids=IDS,
        ready_states=lambda numbers: [states[number] for number in numbers],
        personalise=lambda some: process.personalise(server, some),
        global_weights=shared(server["algorithm"]) if shared else None,
    )


def layout_of(algorithm):
    """The layout that is found or, where of so few clients another is smaller, asked for; what clients own in it."""
    owned = what_clients_own(algorithm, MODEL, ROUNDS)
    if algorithm.export.served_from_state:
        return HYPERNETWORK, [f"client/{name}" for name in owned.states]
    is_shared = algorithm.export.serves_candidates or not owned.weights
    return CLUSTERS if is_shared else STACKED, sorted(owned.weights)


@pytest.fixture
def served_and_weights(name, loop):
    """What is served of a trained algorithm, and the personal weights."""
    with loop.install():
        trained = trained_clients(name)
        layout, owned = layout_of(trained.algorithm)
        served = served_models(trained, "auto" if layout == STACKED or not owned else layout)
        weights = list(trained.personalise(trained.ready_states(np.arange(len(IDS)))))
    global_weights = trained.global_weights
    if global_weights is None:
        global_weights = {name: np.mean([own[name] for own in weights], axis=0) for name in weights[0]}
    return served, weights, global_weights


@pytest.mark.parametrize("name", sorted(ALGORITHMS.own))
def test_rows_of_an_export_are_the_personal_models(name, served_and_weights):
    served, weights, global_weights = served_and_weights
    layout, owned = layout_of(build(name)[0])
    assert (served.layout, sorted(served.models.stacked)) == (layout, owned)
    assert list(served.references) == ["", *IDS]
    for row, expected in [(GLOBAL_ROW, global_weights), *zip(served.models.rows, weights, strict=True)]:
        found = served.models.weights_of_row(int(row))
        assert set(found) == set(expected)
        # A hypernetwork makes weights once more, in two layers of at most eight units; a global model may be a mean.
        again = 2 * 9 if layout == HYPERNETWORK else 0
        bound = 2 * gamma(again + (len(SIZES) + 1 if row == GLOBAL_ROW else 0))
        magnitude = max(np.abs(array).max() for array in expected.values())
        for weight, array in expected.items():
            np.testing.assert_allclose(found[weight], array, rtol=0, atol=bound * magnitude)


@pytest.mark.parametrize("name", parameters(sorted(ALGORITHMS.own), test=EXPORTED))
def test_an_export_answers_like_the_personal_models(name, served_and_weights, fresh_process, tmp_path):
    served, weights, global_weights = served_and_weights
    with hold(tmp_path) as held:
        version = export_models(
            held,
            served.models,
            model_name=name,
            privacy_report={},
            model_card={},
            references=served.references,
            process=fresh_process,
        )
    servable = load_servable(version)
    asked = [*IDS, "stranger", ""] * 2
    rng = np.random.default_rng(0)
    order = rng.permutation(len(asked))
    x = rng.normal(size=(len(asked), *MODEL.input_shape)).astype(np.float32)
    answer = servable.predict("", {"client_id": np.array(asked, object)[order], "x": x[order]})
    models = [*weights, global_weights, global_weights] * 2
    expected = np.stack([_probabilities(own, one) for own, one in zip(models, x, strict=True)])
    # A probability changes by less than the logits do, and these are sums of as many terms as there are weights.
    logits = max(_logit_magnitude(own, one) for own, one in zip(models, x, strict=True))
    np.testing.assert_allclose(
        answer["probabilities"], expected[order], rtol=2 * gamma(16), atol=2 * gamma(MODEL.num_parameters()) * logits
    )
    assert answer["personalized"].tolist() == [asked[place] in IDS for place in order]


def _logit_magnitude(weights, x):
    """Sums the magnitudes of all terms of a logit, which its rounding is relative to."""
    size = np.abs(x.ravel())
    for layer in range(2):
        size = size @ np.abs(weights[f"dense_{layer}/kernel"]) + np.abs(weights[f"dense_{layer}/bias"])
    return float(size.max())


def _probabilities(weights, x):
    return tf.nn.softmax(MODEL.predict(weights, tf.constant(x[np.newaxis])))[0].numpy()
