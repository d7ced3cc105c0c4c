"""What is served of trained clients, in which layout: small cases worked out by hand, without TFF."""

import dataclasses
import tracemalloc

import numpy as np
import pytest
import tensorflow as tf

from tff_pdp.algorithms.shared_parts.udp_hypernet import build_udp_hypernet
from tff_pdp.algorithms.whole_models.fed_avg import build_fed_avg
from tff_pdp.errors import ConfigError
from tff_pdp.models.dense import build_mlp
from tff_pdp.models.derived import SCALE, SHIFT
from tff_pdp.personal_models import served as served_module
from tff_pdp.personal_models import trained_clients
from tff_pdp.personal_models.served import served_models
from tff_pdp.personal_models.trained_clients import TrainedClients

# 2x3 + 3 and 3x2 + 2 weights.
MODEL = build_mlp((2,), 2, (3,))
BODY, HEAD, MODEL_BYTES = 36, 32, 68
GLOBAL = MODEL.init(0)


def with_head(value):
    """The global model with another head."""
    return {name: np.full_like(array, value) if name in MODEL.head else array for name, array in GLOBAL.items()}


def clients_with(weights, model=MODEL, **changes):
    """Clients whose states are their weights."""
    settings = {
        "model": model,
        "algorithm": build_fed_avg(),
        "server_state": {},
        "client_ids": [f"client {number}" for number in range(len(weights))],
        "ready_states": lambda numbers: [weights[number] for number in numbers],
        "personalise": lambda states: states,
        "global_weights": GLOBAL,
    }
    return TrainedClients(**{**settings, **changes})


def assert_serves(served, expected):
    """The global model's weights first; to the bit.

    Rows are copies of weights, means are of small whole numbers, and a hypernetwork makes a row by the same operations.
    """
    rows = [0, *served.models.rows]
    for row, weights in zip(rows, expected, strict=True):
        found = served.models.weights_of_row(row)
        assert set(found) == set(weights)
        for name, array in weights.items():
            np.testing.assert_array_equal(found[name], array, err_msg=name)


def test_heads_are_stacked_and_the_rest_is_shared():
    weights = [with_head(value) for value in (1, 2, 3)]
    served = served_models(clients_with(weights))
    assert (served.layout, served.models.layout) == ("stacked", "stacked")
    assert set(served.models.stacked) == set(MODEL.head)
    assert served.models.rows.tolist() == [1, 2, 3]
    assert served.sizes == {"stacked": BODY + 4 * HEAD, "clusters": BODY + 4 * HEAD, "per_client": 3 * MODEL_BYTES}
    assert served.models.nbytes == served.sizes["stacked"]
    assert list(served.references) == ["", "client 0", "client 1", "client 2"]
    assert_serves(served, [GLOBAL, *weights])


@pytest.mark.parametrize(
    ("values", "layout", "num_rows"),
    [
        # Of 5 rows 2 are left, or 3, which is more than half.
        ((1, 1, 1, 1), "clusters", 2),
        ((1, 2, 1, 2), "stacked", 5),
        # Of 6, 3.
        ((1, 2, 1, 2, 1), "clusters", 3),
    ],
)
def test_clients_with_the_same_model_share_a_row_where_that_halves_the_rows(values, layout, num_rows):
    weights = [with_head(value) for value in values]
    served = served_models(clients_with(weights))
    assert (served.layout, served.models.layout, served.models.num_rows) == (layout, layout, num_rows)
    assert served.models.nbytes == served.sizes[layout] == BODY + num_rows * HEAD
    assert_serves(served, [GLOBAL, *weights])


@pytest.mark.parametrize(("layout", "rows"), [("stacked", [1, 2, 3]), ("clusters", [1, 1, 2])])
def test_a_layout_that_was_asked_for_is_taken(layout, rows):
    weights = [with_head(value) for value in (1, 1, 2)]
    served = served_models(clients_with(weights), layout)
    assert (served.layout, served.models.layout, served.models.rows.tolist()) == (layout, layout, rows)
    assert_serves(served, [GLOBAL, *weights])


def test_a_shared_model_is_held_once_and_its_clients_are_known_all_the_same():
    served = served_models(clients_with([GLOBAL] * 3))
    assert (served.layout, served.models.stacked, served.models.rows.tolist()) == ("clusters", {}, [0, 0, 0])
    assert (len(served.models.client_ids), served.models.nbytes) == (3, MODEL_BYTES)


def test_an_experiment_without_clients_serves_the_global_model():
    served = served_models(clients_with([]))
    assert (served.models.num_rows, list(served.references)) == (1, [""])
    assert_serves(served, [GLOBAL])


def test_small_states_of_no_method_are_refused():
    with pytest.raises(ConfigError, match=r"export\.layout hypernetwork: fed_avg does not make models from"):
        served_models(clients_with([GLOBAL]), "hypernetwork")
    tuned = build_udp_hypernet(hidden_units=(), fine_tune=True)
    with pytest.raises(ConfigError, match="udp_hypernet does not"):
        served_models(clients_with([GLOBAL], algorithm=tuned), "hypernetwork")


def test_an_export_is_divided_only_where_it_is_large_and_clients_are_few(monkeypatch):
    clients = [with_head(value) for value in range(1, 101)]
    monkeypatch.setattr(served_module, "MAX_BYTES_OF_ONE_EXPORT", BODY + 101 * HEAD)
    assert served_models(clients_with(clients)).layout == "stacked"
    monkeypatch.setattr(served_module, "MAX_BYTES_OF_ONE_EXPORT", BODY + 101 * HEAD - 1)
    served = served_models(clients_with(clients))
    assert (served.layout, served.models.layout) == ("per_client", "stacked")
    assert served.sizes["per_client"] == 100 * MODEL_BYTES
    assert served_models(clients_with([*clients, with_head(101)])).layout == "stacked"


def test_without_a_global_model_it_is_the_mean():
    served = served_models(clients_with([with_head(value) for value in (1, 2, 6)], global_weights=None))
    assert_serves(served, [with_head(value) for value in (3, 1, 2, 6)])
    # The mean of equal arrays is the same to the bit, so that they are shared.
    assert set(served.models.stacked) == set(MODEL.head)


@pytest.mark.parametrize("layout", ["per_client", "auto"])
def test_no_mean_goes_to_every_client_where_each_gets_a_file(layout, monkeypatch):
    """Twice the mean of two models, less the one, is the other."""
    monkeypatch.setattr(served_module, "MAX_BYTES_OF_ONE_EXPORT", 0)
    weights = [with_head(value) for value in (1, 5)]
    given = {"global_weights": None, "scalings": scalings([1, 3]), "model_seed": 7}
    served = served_models(clients_with(weights, **given), layout)
    initial = {SHIFT: np.zeros(2), SCALE: np.ones(2), **MODEL.init(7)}
    assert served.layout == "per_client"
    assert_serves(served, [initial, *({**own, **one} for own, one in zip(scalings([1, 3]), weights, strict=True))])
    for name, array in initial.items():
        np.testing.assert_array_equal(served.references[""][name], array)


def test_references_are_spread_over_clients_and_few_where_models_are_large(monkeypatch):
    clients = [with_head(value) for value in range(1, 101)]
    served = served_models(clients_with(clients))
    numbers = [int(name.removeprefix("client ")) for name in list(served.references)[1:]]
    assert (len(numbers), numbers[0], numbers[-1]) == (32, 0, 99)
    assert set(np.diff(numbers)) == {3, 4}
    for number, (name, weights) in zip(numbers, list(served.references.items())[1:], strict=True):
        np.testing.assert_array_equal(weights[MODEL.head[0]], clients[number][MODEL.head[0]], err_msg=name)
    monkeypatch.setattr(trained_clients, "_BYTES_AT_A_TIME", 3 * MODEL_BYTES)
    assert list(served_models(clients_with(clients)).references) == ["", "client 0", "client 49", "client 99"]


def scalings(shifts):
    return [{SHIFT: np.full(2, shift, np.float32), SCALE: np.full(2, 0.3, np.float32)} for shift in shifts]


def test_scalings_are_shared_or_stacked_like_weights():
    weights = [with_head(value) for value in (1, 2, 3)]
    served = served_models(clients_with(weights, scalings=scalings([0.1] * 3)))
    assert set(served.models.stacked) == set(MODEL.head)
    assert_serves(served, [{**scalings([0.1])[0], **own} for own in [GLOBAL, *weights]])
    served = served_models(clients_with(weights, scalings=scalings([1, 2, 6])))
    assert set(served.models.stacked) == {SHIFT, *MODEL.head}
    own = scalings([3, 1, 2, 6])
    assert_serves(served, [{**own[row], **one} for row, one in enumerate([GLOBAL, *weights])])
    assert set(served.references["client 1"]) == set(served.models.weights_of_row(0))
    x = np.array([[5.0, -1.0]], np.float32)
    found = served.models.model.predict(served.models.weights_of_row(2), tf.constant(x))
    np.testing.assert_array_equal(found, MODEL.predict(weights[1], tf.constant((x + 2) * np.float32(0.3))))


HYPER = build_udp_hypernet(hidden_units=(), descriptor_size=2)


def clients_of_a_hypernetwork(number, **changes):
    """Each with a descriptor of its own, but for the first, who never took part."""
    server = HYPER.init_server({name: tf.constant(array) for name, array in GLOBAL.items()})
    message = HYPER.broadcast(server)
    first = HYPER.init_client(message)
    states = [{"descriptor": np.asarray(first["descriptor"]) + np.float32(one)} for one in range(number)]
    weights = [HYPER.personalise(message, state) for state in states]
    settings = {
        "algorithm": HYPER,
        "server_state": server,
        "ready_states": lambda numbers: [states[one] for one in numbers],
        "personalise": lambda states: [HYPER.personalise(message, state) for state in states],
        "global_weights": weights[0],
    }
    return weights, clients_with(states, **{**settings, **changes})


def test_a_hypernetwork_and_descriptors_are_served_where_they_are_smaller_than_models():
    # 2x17 + 17 values of heads; descriptors of 2.
    parameters = 4 * 51
    for number, layout in ((2, "stacked"), (20, "hypernetwork")):
        weights, trained = clients_of_a_hypernetwork(number)
        served = served_models(trained)
        assert served.sizes["hypernetwork"] == parameters + (1 + number) * 8
        assert served.sizes["stacked"] == (1 + number) * MODEL_BYTES
        assert served.layout == layout
        assert_serves(served, [weights[0], *weights])
    models = served.models
    assert (models.layout, list(models.stacked), models.num_rows) == ("hypernetwork", ["client/descriptor"], 21)
    assert models.nbytes == served.sizes["hypernetwork"]
    assert all(name.startswith("broadcast/parameters/") for name in models.shared)
    for name, array in weights[19].items():
        np.testing.assert_array_equal(served.references["client 19"][name], array)


def test_a_hypernetwork_may_be_served_as_models():
    weights, trained = clients_of_a_hypernetwork(20)
    served = served_models(trained, "stacked")
    assert (served.models.make_weights, set(served.models.stacked)) == (None, set(GLOBAL))
    assert_serves(served, [weights[0], *weights])


def test_a_hypernetwork_of_scaled_inputs_keeps_the_scalings_beside_the_descriptors():
    own = scalings(range(20))
    weights, trained = clients_of_a_hypernetwork(20, scalings=own)
    served = served_models(trained)
    assert set(served.models.stacked) == {SHIFT, "client/descriptor"}
    assert SCALE in served.models.shared
    expected = [{**scaling, **one} for scaling, one in zip(own, weights, strict=True)]
    assert_serves(served, [{**scalings([9.5])[0], **weights[0]}, *expected])


def test_descriptors_that_nobody_changed_are_shared():
    weights, trained = clients_of_a_hypernetwork(1)
    served = served_models(dataclasses.replace(trained, client_ids=["only"]), "hypernetwork")
    assert (served.models.stacked, served.models.num_rows) == ({}, 1)
    assert_serves(served, [weights[0], weights[0]])


def test_memory_is_that_of_heads_and_of_some_models():
    """200 clients with bodies of 2 MB: together they would take 400 MB."""
    large = build_mlp((1000,), 2, (500,))
    initial = large.init(0)

    def personalise(numbers):
        return [
            {
                name: np.full_like(array, number + 1) if name in large.head else array.copy()
                for name, array in initial.items()
            }
            for number in numbers
        ]

    trained = clients_with(range(200), model=large, personalise=personalise, global_weights=initial)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trained_clients, "_BYTES_AT_A_TIME", 2**24)
        tracemalloc.start()
        served = served_models(trained)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert set(served.models.stacked) == set(large.head)
    assert served.models.stacked[large.head[0]].shape[0] == 201
    # A part, the references, and the initial model a few times.
    assert peak < 2 * 2**24 + 16e6
