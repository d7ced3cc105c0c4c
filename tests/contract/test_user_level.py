"""What every method that releases means must do where users are protected, by a clipped, noised sum of all of it."""

import collections
import functools
import math

import numpy as np
import pytest
import tensorflow as tf

from tests.contract.contract_support import SMALLER, assert_close, roundings
from tests.contract.covering import COVERING_USERS
from tests.privacy.mechanisms.grid_support import public_step
from tests.rounding import gamma
from tests.tiers import parameters
from tff_pdp.algorithms.minibatch import build_minibatch
from tff_pdp.experiment.hparams import build_algorithm
from tff_pdp.experiment.kinds import ALGORITHMS
from tff_pdp.experiment.run_key import RunKey
from tff_pdp.privacy.accounting.accountants import Adjacency
from tff_pdp.privacy.mechanisms.parameters import UserMechanism
from tff_pdp.privacy.mechanisms.user_noise import FixedClip, UserSum
from tff_pdp.privacy.plans.user import UserPlan
from tff_pdp.processes.client_work import num_released
from tff_pdp.processes.compose import client_params_columns, compose
from tff_pdp.testing.algorithms import MODEL, ROUNDS, SIZES, client_data, leaves

KEY = RunKey.from_test_seed(5)
RATE, COHORT = 0.5, 2.0
ESTIMATOR = build_minibatch(MODEL, 64)
# All padded alike: every shape takes another compilation.
CLIENTS = client_data(rows=(9,) * len(SIZES))


@functools.cache
def algorithm_of(name):
    algorithm, _ = build_algorithm(name, SMALLER.get(name, {}), num_clients=len(SIZES), rounds=ROUNDS, head=MODEL.head)
    return algorithm


def is_for_users(name):
    algorithm = algorithm_of(name)
    return set(algorithm.released.values()) <= {"mean"} and algorithm.candidates is None and not algorithm.public


NAMES = sorted(filter(is_for_users, ALGORITHMS.own))
RELEASING = [name for name in NAMES if algorithm_of(name).released]


@functools.cache
def process_of(name):
    return compose(algorithm_of(name), MODEL, estimator=ESTIMATOR, user_sum=UserSum(FixedClip(), RATE))


def started(name, clip_norm, noise_multiplier, seeds=None):
    """The server's first state, and a new client's."""
    process, size = process_of(name), num_released(algorithm_of(name), MODEL)
    server = process.initialize()
    state = process.init_client(server)
    plan = UserPlan(
        unit="user",
        adjacency=Adjacency.ADD_OR_REMOVE_ONE,
        claim="none",
        claim_reason="",
        budgets={},
        rounds=ROUNDS,
        batch_size=64,
        mechanism=UserMechanism(clip_norm, noise_multiplier, RATE, COHORT),
        noise=FixedClip(),
        num_users=4,
        is_constant=False,
        num_released=size,
        num_noised=size,
    )
    return plan.start(server, KEY.server_seeds() if seeds is None else seeds), state


def params_of(name, number, clients, **hparams):
    algorithm = algorithm_of(name)
    columns = client_params_columns(
        algorithm,
        ESTIMATOR,
        mechanism={},
        hparams={**dict.fromkeys(algorithm.step_hparams, 2), **hparams},
        seeds=np.stack([KEY.client_seed(number, str(client)) for client in clients]),
    )
    return [tf.nest.map_structure(lambda column, i=index: column[i], columns) for index in range(len(clients))]


def step(name, server, clients, state, number=1, data=CLIENTS, **hparams):
    """One round of some clients, all in the same state."""
    params = params_of(name, number, clients, **hparams) if clients else []
    return process_of(name).next(server, [state] * len(clients), [data[client] for client in clients], params)


@pytest.fixture(scope="module")
def loop(engines):
    """One is enough where what is tested is no engine."""
    return engines["loop"]


def released_norm(metrics):
    """The norm of all that a round's mean consists of, times what it was divided by."""
    return COHORT * math.sqrt(sum(float(norm) ** 2 for norm in metrics.values()))


def test_some_methods_are_for_users_and_some_are_not():
    assert {"dp_fed_avg_ft", "pmtl_ft", "pp_sgd", "centaur", "dp_pfed_dsu", "udp_hypernet", "local_only"} <= set(NAMES)
    assert not {name for name in NAMES if name.startswith("ifca")} and "mocha" not in NAMES
    assert set(NAMES) - set(RELEASING) == {"local_only"}


@pytest.mark.parametrize("name", parameters(RELEASING, test=COVERING_USERS))
def test_all_that_one_user_releases_is_clipped_as_a_whole(name, loop):
    with loop.install():
        free = released_norm(step(name, *_with([0], started(name, math.inf, 0.0)), learning_rate=0.3)[2])
        assert free > 0.0
        for clip_norm in (free / 100, free / 1.5, free * 1.5):
            norm = released_norm(step(name, *_with([0], started(name, clip_norm, 0.0)), learning_rate=0.3)[2])
            # Squares of all values are summed, for the clip and then for the norm, all of one sign.
            size = num_released(algorithm_of(name), MODEL)
            rounded = 2 * gamma(2 * size + 16) * min(free, clip_norm)
            # Each value ends up to a step of the grid nearer to zero, and the clip leaves 2^-20 for float64.
            short = math.sqrt(size) * public_step(clip_norm, 0.0) + 2.0**-20 * clip_norm
            assert min(free, clip_norm) - short - rounded <= norm <= min(free, clip_norm) + rounded


def _with(clients, states):
    server, state = states
    return server, clients, state


@pytest.mark.parametrize("name", parameters(NAMES, test=COVERING_USERS))
def test_every_engine_gives_the_same_noised_rounds(name, engines):
    results = {}
    for engine_name, engine in engines.items():
        with engine.install():
            server, state = started(name, 0.05, 0.7)
            server, _, first = step(name, server, [0, 1, 2, 3], state, 1, learning_rate=0.03)
            server, states, second = step(name, server, [3, 0, 2, 1], state, 2, learning_rate=0.03)
            results[engine_name] = server["algorithm"], list(states), first, second
    for engine_name in ("loop", "vectorized"):
        for part, native in zip(results[engine_name], results["native"], strict=True):
            assert_close(part, native, roundings(rounds=2))
    norms = [float(norm) for metrics in results["loop"][2:] for norm in metrics.values()]
    assert len(set(norms)) == 2 * len(algorithm_of(name).released)


@pytest.mark.parametrize("name", parameters(RELEASING, test=COVERING_USERS))
def test_a_round_of_nobody_is_noise_of_the_same_size(name, loop):
    size = num_released(algorithm_of(name), MODEL)
    with loop.install():
        start, state = started(name, 0.5, 4.0)
        server, states, metrics = step(name, start, [], state)
        other, _, _ = step(name, started(name, 0.5, 4.0, RunKey.from_test_seed(6).server_seeds())[0], [], state)
        nothing, _, silence = step(name, started(name, 0.5, 0.0)[0], [], state)
    assert list(states) == []
    assert released_norm(metrics) == pytest.approx(0.5 * 4.0 * math.sqrt(size), rel=6 / math.sqrt(2 * size))
    assert all(np.isfinite(leaf).all() for leaf in leaves(server["algorithm"]))
    assert not _same(server["algorithm"], start["algorithm"])
    assert not _same(server["algorithm"], other["algorithm"])
    # Without noise, nothing happens at all.
    assert released_norm(silence) == 0.0
    assert all(np.isfinite(leaf).all() for leaf in leaves(nothing["algorithm"]))


@pytest.mark.parametrize("name", ["native", "loop", "vectorized"])
def test_every_engine_runs_a_round_of_nobody(name, engines):
    with engines[name].install():
        server, _ = started("dp_fed_avg_ft", 0.5, 4.0)
        server = process_of("dp_fed_avg_ft").next_of_nobody(server, [], [], [])
    assert all(np.isfinite(leaf).all() for leaf in leaves(server["algorithm"]))


def _same(one, other):
    return all(np.array_equal(a, b) for a, b in zip(leaves(one), leaves(other), strict=True))


@pytest.mark.parametrize("name", parameters(RELEASING, test=COVERING_USERS))
def test_how_many_examples_a_user_has_does_not_count(name, loop):
    """The same examples twice are the same gradients; a user who has more of them counts no more than another."""
    twice = [
        collections.OrderedDict(
            x=np.concatenate([own["x"][: own["num_examples"]]] * copies),
            y=np.concatenate([own["y"][: own["num_examples"]]] * copies),
            num_examples=np.int32(copies * own["num_examples"]),
        )
        for own, copies in zip(CLIENTS, (4, 1, 2, 1), strict=True)
    ]
    with loop.install():
        once = step(name, *_with([0, 1, 2, 3], started(name, 0.05, 0.7)))
        more = step(name, *_with([0, 1, 2, 3], started(name, 0.05, 0.7)), data=twice)
    # Batches have up to four times as many examples.
    assert_close(once[0]["algorithm"], more[0]["algorithm"], roundings(rounds=1) + 4 * max(SIZES))


@pytest.mark.parametrize("name", parameters(NAMES, test=COVERING_USERS))
def test_what_a_user_keeps_does_not_depend_on_the_servers_noise_or_on_other_users(name, loop):
    """In one round: it is of the broadcast and of the user's own data."""
    with loop.install():
        server, state = started(name, 0.05, 0.0)
        _, states, _ = step(name, server, [0, 1, 2], state)
        server, _ = started(name, 0.05, 3.0)
        _, alone, _ = step(name, server, [1], state)
    assert _same(list(states)[1], next(iter(alone)))
