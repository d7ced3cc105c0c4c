"""CENTAUR, FedRep and FedPer: a shared body, and heads that stay with their clients."""

import collections

import numpy as np
import pytest
import tensorflow as tf

from tests.algorithms.algorithm_support import NO_DATA
from tests.algorithms.two_part_support import HEAD, assert_values, hparams, product_to, two_weights, values
from tests.rounding import gamma
from tff_pdp.algorithms.base import split
from tff_pdp.algorithms.minibatch import build_minibatch
from tff_pdp.algorithms.shared_parts.centaur import build_centaur, build_fed_rep
from tff_pdp.algorithms.shared_parts.fed_per import build_fed_per
from tff_pdp.errors import ConfigError
from tff_pdp.experiment.hparams import build_algorithm
from tff_pdp.models.dense import build_mlp

BUILDERS = {"centaur": build_centaur, "fed_rep": build_fed_rep, "fed_per": build_fed_per}
IN_TURN = ("centaur", "fed_rep")
STEPS = {"learning_rate": 0.5, "head_learning_rate": 0.0625, "head_steps": 1, "local_steps": 1}


@pytest.fixture(params=sorted(BUILDERS))
def algorithm(request):
    return BUILDERS[request.param](head=HEAD)


def own_head(value):
    return {"head": {"head": tf.constant([value])}}


def update(algorithm, grad_fn, body=2.0, initial_head=100.0, head=1.0, **given):
    """A round of a client whose head is its own, not the server's."""
    message = algorithm.broadcast(algorithm.init_server(two_weights(body, initial_head)))
    return algorithm.client_update(message, own_head(head), NO_DATA, grad_fn, hparams(**{**STEPS, **given}))


@pytest.mark.parametrize("name", IN_TURN)
def test_first_the_head_then_the_body_with_that_head(name):
    # Towards 6, off by 2 * 1 - 6 = -4: head 1 + 4 * 2 / 16 = 1.5. Then off by -3: body 2 + 3 * 1.5 / 2 = 4.25.
    result = update(BUILDERS[name](head=HEAD), product_to(6.0))
    assert_values(result.state["head"], head=1.5)
    assert_values(result.released["update"], body=2.25)


def test_fed_per_trains_both_at_once():
    # Off by -4: body 2 + 4 * 1 / 4 = 3, head 1 + 4 * 2 / 4 = 3. The head's own rate is for adapting only.
    result = update(build_fed_per(head=HEAD), product_to(6.0), learning_rate=0.25)
    assert_values(result.state["head"], head=3.0)
    assert_values(result.released["update"], body=1.0)


@pytest.mark.parametrize("name", IN_TURN)
def test_gradients_of_the_head_come_before_those_of_the_body(name):
    asked = []
    update(BUILDERS[name](head=HEAD), product_to(6.0, asked), head_steps=(2, 4), local_steps=(3, 5))
    assert asked == [(0, ["head"]), (1, ["head"]), (2, ["body"]), (3, ["body"]), (4, ["body"])]
    assert BUILDERS[name](head=HEAD).step_hparams == ("head_steps", "local_steps")


def test_fed_per_asks_for_a_gradient_of_both_in_each_step():
    asked = []
    update(build_fed_per(head=HEAD), product_to(6.0, asked), local_steps=(2, 3))
    assert asked == [(0, ["body", "head"]), (1, ["body", "head"])]


@pytest.mark.parametrize("name", IN_TURN)
def test_local_momentum_is_the_bodys_alone(name):
    # Two steps of the head without it: off by -6, then -2 * (2 * 1 - 8) ...: 1 + 6 * 2 / 16 = 1.75, then off by -4.5:
    # 1.75 + 4.5 * 2 / 16 = 2.3125. The body, off by -3.375: movement -3.375 * 2.3125 / 4 = -1.951171875; then, off by
    # 3.951171875 * 2.3125 - 8 = 1.137084960..., by 1.137084960... * 2.3125 / 4 and half the first movement.
    first = -3.375 * 2.3125 / 4
    second = 0.5 * first + ((2 - first) * 2.3125 - 8) * 2.3125 / 4
    result = update(
        BUILDERS[name](head=HEAD, local_momentum=0.5),
        product_to(8.0),
        learning_rate=0.25,
        head_steps=2,
        local_steps=2,
    )
    assert_values(result.state["head"], head=2.3125)
    # All are multiples of 2^-21 below 8, which float32 holds.
    assert_values(result.released["update"], body=-first - second)


def test_of_a_client_only_the_bodys_update_is_released(algorithm):
    result = update(algorithm, product_to(6.0))
    assert algorithm.released == {"update": "mean"}
    assert {name: list(value) for name, value in result.released.items()} == {"update": ["body"]}
    assert {name: list(value) for name, value in result.state.items()} == {"head": ["head"]}


@pytest.mark.parametrize("name", sorted(BUILDERS))
@pytest.mark.parametrize("server_optimizer", ["sgd", "momentum", "adam"])
def test_the_server_trains_the_body_and_keeps_the_public_head(name, server_optimizer):
    given = {} if name == "fed_rep" else {"server_optimizer": server_optimizer, "server_learning_rate": 1.0}
    algorithm = BUILDERS[name](head=HEAD, **given)
    state = algorithm.init_server(two_weights(2.0, 7.0))
    for _ in range(3):
        state = algorithm.server_update(state, {"update": {"body": tf.constant([0.5])}})
    assert list(state["weights"]) == ["body", "head"]
    if name == "fed_rep" or server_optimizer == "sgd":
        assert_values(state["weights"], body=3.5, head=7.0)
    elif server_optimizer == "momentum":
        # 0.5 + 0.95 + 1.355, each of a product, two sums and a power of a rounded 0.9.
        np.testing.assert_allclose(state["weights"]["body"], [2 + 2.805], rtol=gamma(3 * 4))
    assert values(state["weights"])["head"] == 7.0
    # Moments are of the body alone.
    assert all(list(moment) == ["body"] for moment in state["optimizer"].values())


@pytest.mark.parametrize("name", ["centaur", "fed_per"])
def test_the_servers_rate_and_momentum_are_used(name):
    algorithm = BUILDERS[name](head=HEAD, server_optimizer="momentum", server_learning_rate=2.0, server_momentum=0.5)
    state = algorithm.init_server(two_weights(2.0, 7.0))
    for _ in range(2):
        state = algorithm.server_update(state, {"update": {"body": tf.constant([1.0])}})
    assert_values(state["weights"], body=2 + 2 * 1 + 2 * 1.5, head=7.0)


def test_a_new_client_starts_from_the_public_head(algorithm):
    message = algorithm.broadcast(algorithm.init_server(two_weights(2.0, 7.0)))
    assert_values(algorithm.init_client(message)["head"], head=7.0)


def test_the_shared_model_has_the_initial_head(algorithm):
    state = algorithm.init_server(two_weights(2.0, 7.0))
    state = algorithm.server_update(state, {"update": {"body": tf.constant([0.5])}})
    assert_values(algorithm.global_model(state), body=2.5, head=7.0)


def test_a_personal_model_is_the_shared_body_with_the_own_head(algorithm):
    model = algorithm.personalise({"weights": two_weights(2.0, 7.0)}, own_head(3.0))
    assert list(model) == ["body", "head"]
    assert_values(model, body=2.0, head=3.0)


def test_a_client_adapts_its_own_head_alone(algorithm):
    # Towards 10, from head 3 with body 2: off by -4 and then -2, head 3 + 4 * 2 / 8 = 4 and then 4 + 2 * 2 / 8 = 4.5.
    asked = []
    message = {"weights": two_weights(2.0, 7.0)}
    given = hparams(**{**STEPS, "head_learning_rate": 0.125, "adapt_steps": (2, 3)})
    adapted = algorithm.adapt(message, own_head(3.0), NO_DATA, product_to(10.0, asked), given)
    assert {name: list(value) for name, value in adapted.items()} == {"head": ["head"]}
    assert_values(adapted["head"], head=4.5)
    assert asked == [(0, ["head"]), (1, ["head"])]
    assert_values(algorithm.personalise(message, adapted), body=2.0, head=4.5)


def test_fed_rep_is_centaur_under_another_name():
    fed_rep, centaur = build_fed_rep(head=HEAD), build_centaur(head=HEAD)
    assert (fed_rep.name, centaur.name) == ("fed_rep", "centaur")
    results = [update(one, product_to(6.0), head_steps=2, local_steps=3) for one in (fed_rep, centaur)]
    assert values(results[0].released["update"]) == values(results[1].released["update"])
    assert values(results[0].state["head"]) == values(results[1].state["head"])
    state = fed_rep.init_server(two_weights(2.0, 7.0))
    assert_values(fed_rep.server_update(state, {"update": {"body": tf.constant([0.5])}})["weights"], body=2.5, head=7.0)


@pytest.mark.parametrize("head", [(), ("elsewhere",), ("body", "head")])
def test_a_model_without_a_body_or_without_a_head_is_an_error(head):
    with pytest.raises(ConfigError, match=r"algorithms\.centaur .* body .* head"):
        build_centaur(head=head).init_server(two_weights(2.0, 7.0))


@pytest.mark.parametrize("name", IN_TURN)
@pytest.mark.parametrize("momentum", [-0.1, 1.0, float("nan")])
def test_a_momentum_out_of_range_is_an_error(name, momentum):
    with pytest.raises(ConfigError, match=rf"{name}\.local_momentum must be .* at least 0 and below 1, not {momentum}"):
        build_algorithm(name, {"local_momentum": momentum}, num_clients=2, rounds=1, head=HEAD)


MODEL = build_mlp((2,), 0, (3,))
SIZES, ROWS, BATCH_SIZE = (5, 3, 1, 4), (5, 5, 5, 4), 2
# Every client has counts and batches of its own.
COUNTS = {"head_steps": (3, 1, 2, 4), "local_steps": (2, 4, 1, 1)}
SEEDS = (0, 1, 2, 4)
RATES = {"learning_rate": 0.1, "head_learning_rate": 0.2}
INPUTS, HIDDEN, ROUNDS = 2, 3, 2
# The sums of a forward and a backward pass over inputs, hidden units and a batch; of a step's error, mean, rate and
# velocity seven more; in the end the mean over clients. Of the weights, which no sum of a step exceeds by much.
STEP = 2 * (INPUTS + 1 + HIDDEN + 1) + BATCH_SIZE + 7
MOST_STEPS = max(head + body for head, body in zip(COUNTS["head_steps"], COUNTS["local_steps"], strict=True))
ROUNDING = gamma(ROUNDS * (MOST_STEPS * STEP + len(SIZES) + 1))


@pytest.mark.parametrize("parallelism", ["loop", pytest.param("vectorized", marks=pytest.mark.all)])
def test_rounds_of_centaur_for_different_clients_against_numpy(parallelism):
    from tff_pdp.engines.running import build_engine
    from tff_pdp.processes.compose import compose

    algorithm = build_centaur(head=MODEL.head, local_momentum=0.5)
    rng = np.random.default_rng(0)
    x = [rng.normal(size=(rows, 2)).astype(np.float32) for rows in ROWS]
    y = [rng.normal(size=rows).astype(np.float32) for rows in ROWS]
    data = [
        collections.OrderedDict(x=one, y=other, num_examples=np.int32(size))
        for one, other, size in zip(x, y, SIZES, strict=True)
    ]
    params = [
        collections.OrderedDict(
            mechanism=collections.OrderedDict(),
            hparams=collections.OrderedDict(
                (name, np.float32(RATES[name]) if name in RATES else np.int32(COUNTS.get(name, [1] * 4)[client]))
                for name in algorithm.hparams
            ),
            seed=np.array([SEEDS[client], 0], np.int64),
        )
        for client in range(len(SIZES))
    ]
    process = compose(algorithm, MODEL, estimator=build_minibatch(MODEL, BATCH_SIZE))
    engine = build_engine("inprocess", client_parallelism=parallelism)
    with engine.install():
        server = process.initialize()
        clients = [process.init_client(server)] * len(SIZES)
        for _ in range(ROUNDS):
            server, clients, _ = process.next(server, clients, data, params)
    engine.close()
    expected, heads = centaur_in_numpy(x, y, rounds=ROUNDS)
    bound = ROUNDING * max(np.abs(value).max() for value in expected.values())
    for name, value in expected.items():
        np.testing.assert_allclose(server["algorithm"]["weights"][name], value, atol=bound)
    for client, own in zip(clients, heads, strict=True):
        assert list(client["head"]) == list(MODEL.head)
        for name, value in own.items():
            np.testing.assert_allclose(client["head"][name], value, atol=bound)


def centaur_in_numpy(x, y, rounds):
    """The server's weights and the clients' heads, in float64."""
    server = {name: value.astype(np.float64) for name, value in MODEL.init(0).items()}
    heads = [split(server, MODEL.head)[0]] * len(SIZES)
    body_names = [name for name in server if name not in MODEL.head]
    for _ in range(rounds):
        updates = []
        for client, size in enumerate(SIZES):
            own = {**server, **heads[client]}
            starts = list(range(0, size, BATCH_SIZE))
            velocity = dict.fromkeys(server, 0.0)
            total = COUNTS["head_steps"][client] + COUNTS["local_steps"][client]
            for number in range(total):
                start = starts[(SEEDS[client] + number) % len(starts)]
                rows = slice(start, min(start + BATCH_SIZE, size))
                gradient = numpy_gradient(own, x[client][rows], y[client][rows])
                if number < COUNTS["head_steps"][client]:
                    own |= {name: own[name] - 0.2 * gradient[name] for name in MODEL.head}
                    continue
                velocity = {name: 0.5 * velocity[name] + 0.1 * gradient[name] for name in body_names}
                own |= {name: own[name] - velocity[name] for name in body_names}
            heads[client] = {name: own[name] for name in MODEL.head}
            updates.append({name: own[name] - server[name] for name in body_names})
        server |= {name: server[name] + np.mean([one[name] for one in updates], axis=0) for name in body_names}
    return server, heads


def numpy_gradient(weights, x, y):
    """Of the mean of half the squared errors of a network of one hidden layer."""
    hidden = np.maximum(0, x @ weights["dense_0/kernel"] + weights["dense_0/bias"])
    errors = (hidden @ weights["dense_1/kernel"] + weights["dense_1/bias"] - y[:, np.newaxis]) / len(y)
    back = (errors @ weights["dense_1/kernel"].T) * (hidden > 0)
    return {
        "dense_0/kernel": x.T @ back,
        "dense_0/bias": back.sum(axis=0),
        "dense_1/kernel": hidden.T @ errors,
        "dense_1/bias": errors.sum(axis=0),
    }
