"""What attacks are aimed at: releases of one record or one user more or less, through what users of the package call.

Models are linear and begin at zero, so that a model after one step is what was released, times a public number.
"""

import collections
import dataclasses
import functools

import numpy as np
import tensorflow as tf

from tff_pdp.algorithms.base import ClientData
from tff_pdp.algorithms.minibatch import build_minibatch
from tff_pdp.experiment.hparams import build_algorithm
from tff_pdp.models.dense import build_mlp
from tff_pdp.privacy.accounting.accountants import Adjacency
from tff_pdp.privacy.mechanisms.dp_sgd import build_dp_sgd
from tff_pdp.privacy.mechanisms.parameters import UserMechanism
from tff_pdp.privacy.mechanisms.user_noise import FixedClip, UserSum
from tff_pdp.privacy.plans.user import UserPlan
from tff_pdp.processes.client_work import num_released
from tff_pdp.processes.compose import client_params_columns, compose

# 650 weights; so many that noise is drawn step by step; and 64, for hypotheses by the thousand.
DIGITS = build_mlp((8, 8, 1), 10, ())
LARGE = build_mlp((21, 21, 1), 10, ())
TINY = build_mlp((3, 5, 1), 4, ())
CLIP = 1.0
# With this noise on a record of length one, an honest attack on one release is right in 50.2 % of cases.
LOUD = 100.0
# Granularity shows where noise all but cancels a sum, which happens often where there is little of it.
QUIET = 0.2


@dataclasses.dataclass(frozen=True)
class Target:
    """How cases are released.

    Attributes:
      unit: what a noised sum is multiplied by.
      roundings: of a released value, from the addition of the noise on.
    """

    unit: float
    roundings: int


def records_of(model, others="normal", num_others=5):
    """Records of a silo, float32 x and y: some others and, as the last one, the target.

    Blank ones have gradients of biases alone, so that the target's is all that there is at the other weights.
    """
    rng = np.random.default_rng(3)
    x = rng.normal(size=(num_others + 1, *model.input_shape)).astype(np.float32)
    if others == "blank":
        x[:-1] = 0.0
    return x, rng.integers(0, model.num_classes, num_others + 1, dtype=np.int64)


def memberships(cases):
    """Every other case has the target."""
    return np.arange(cases) % 2 == 0


def seeds_of(cases, seed=0):
    """A secret seed for each case: int64 `[cases, 2]`."""
    return np.random.default_rng([seed, cases]).integers(-(2**63), 2**63 - 1, (cases, 2))


# The divisor is a power of two, so that what is released has only been rounded by the mechanism.
ONE_STEP = Target(unit=1 / 64, roundings=1)


def one_step(model, form, is_member, noise_multiplier, others="normal", seed=0):
    """What the gradient estimator returns for one step of clients that are stacked or computed one by one."""
    estimator = build_dp_sgd(model)
    x, y = records_of(model, others)
    data = ClientData(tf.constant(x), tf.constant(y), tf.constant(len(y)))
    weights = collections.OrderedDict((name, tf.constant(value)) for name, value in model.init(0).items())
    scalars = {
        "clip_norm": CLIP,
        "noise_multiplier": noise_multiplier,
        "sampling_rate": 1.0,
        "expected_batch_size": 1 / ONE_STEP.unit,
    }
    mechanism = {name: tf.constant(scalars[name], tf.float32) for name in estimator.mechanism}

    @tf.function(autograph=False)
    def step(num_examples, seeds):
        cases = tf.shape(seeds)[0]
        columns = {name: tf.fill([cases], value) for name, value in mechanism.items()}
        draws = estimator.draw(columns, num_examples, tf.constant(len(y)), tf.ones([cases], tf.int32), seeds)

        def gradient(own):
            result = estimator.gradient(mechanism, own, weights, data, tf.constant(0), tf.constant(1.0), None, None)
            return tf.concat([tf.reshape(value, [-1]) for value in result.values()], axis=0)

        if form == "stacked":
            return tf.vectorized_map(gradient, draws)
        return tf.map_fn(gradient, draws, fn_output_signature=tf.TensorSpec([model.num_parameters()], tf.float32))

    sizes = np.where(is_member, len(y), len(y) - 1).astype(np.int32)
    return step(tf.constant(sizes), tf.constant(seeds_of(len(is_member), seed))).numpy()


_LEARNING_RATE, _BATCH = np.float32(0.1), np.float32(50.0)
SILO_ROUND = Target(unit=-float(_LEARNING_RATE / _BATCH), roundings=2)


@functools.cache
def _silo_process(model):
    algorithm, _ = build_algorithm("mr_mtl", {}, num_clients=2, rounds=1, head=model.head)
    estimator = build_dp_sgd(model)
    return algorithm, estimator, compose(algorithm, model, estimator=estimator)


def silo_round(model, is_member, noise_multiplier, others="normal", seed=0):
    """The weights of silos after one round of one step, all silos in the same round of the installed engine."""
    algorithm, estimator, process = _silo_process(model)
    x, y = records_of(model, others)
    columns = client_params_columns(
        algorithm,
        estimator,
        mechanism={
            "clip_norm": CLIP,
            "noise_multiplier": noise_multiplier,
            "sampling_rate": 1.0,
            "expected_batch_size": _BATCH,
        },
        hparams={"learning_rate": _LEARNING_RATE, "local_steps": 1},
        seeds=seeds_of(len(is_member), seed),
    )
    data = [
        collections.OrderedDict(x=x, y=y, num_examples=np.int32(len(y) if member else len(y) - 1))
        for member in is_member
    ]
    params = [tf.nest.map_structure(lambda column, i=case: column[i], columns) for case in range(len(is_member))]
    server = process.initialize()
    _, states, _ = process.next(server, [process.init_client(server)] * len(is_member), data, params)
    return np.stack([_flat(state["weights"]) for state in states])


# The expected cohort is no power of two: what is released is rounded once more.
_COHORT = 3.0
USERS_ROUND = Target(unit=1 / _COHORT, roundings=2)


@functools.cache
def _users_process(model, noise):
    algorithm, _ = build_algorithm("fed_avg", {}, num_clients=2, rounds=1, head=model.head)
    estimator = build_minibatch(model, 4)
    return algorithm, estimator, compose(algorithm, model, estimator=estimator, user_sum=UserSum(noise, 0.5))


def users_rounds(model, cohorts, noise_multiplier, others="normal", noise=None, seed=0):
    """The models after each of some rounds of users, one cohort in each, all rounds from the same model.

    A cohort is a list of numbers of users, who have one record each; the last of them is the target. The noise of a
    fixed clip is that of rounds after one another; other kinds begin anew in every round.
    """
    noise = FixedClip() if noise is None else noise
    algorithm, estimator, process = _users_process(model, noise)
    num_users = 1 + max(max(cohort, default=0) for cohort in cohorts)
    x, y = records_of(model, others, num_others=num_users - 1)
    users = [
        collections.OrderedDict(x=x[user : user + 1], y=y[user : user + 1], num_examples=np.int32(1))
        for user in range(num_users)
    ]
    # Long enough updates to be clipped, but for blank records', which are never long.
    columns = client_params_columns(
        algorithm, estimator, mechanism={}, hparams={"learning_rate": 10.0}, seeds=seeds_of(num_users)
    )
    params = [tf.nest.map_structure(lambda column, i=user: column[i], columns) for user in range(num_users)]
    plan = user_plan(num_released(algorithm, model), noise_multiplier, noise)
    start = process.initialize()
    state = process.init_client(start)
    aggregation, released = None, []
    for number, cohort in enumerate(cohorts):
        if aggregation is None or not isinstance(noise, FixedClip):
            server_seeds = np.stack([seeds_of(len(cohorts), seed)[number], seeds_of(len(cohorts), seed + 1)[number]])
            aggregation = plan.start(start, server_seeds)["aggregation"]
        server = {**start, "aggregation": aggregation}
        arguments = [state] * len(cohort), [users[user] for user in cohort], [params[user] for user in cohort]
        after = process.next(server, *arguments)[0] if cohort else process.next_of_nobody(server, *arguments)
        released.append(_flat(after["algorithm"]["weights"]))
        aggregation = after["aggregation"]
    return np.stack(released)


def user_plan(size, noise_multiplier, noise):
    """A plan of which only the noise matters."""
    return UserPlan(
        unit="user",
        adjacency=Adjacency.ADD_OR_REMOVE_ONE,
        claim="none",
        claim_reason="",
        budgets={},
        rounds=1,
        batch_size=4,
        mechanism=UserMechanism(CLIP, noise_multiplier, 0.5, _COHORT),
        noise=noise,
        num_users=2,
        is_constant=True,
        num_released=size,
        num_noised=size,
    )


def cohorts_of(is_member):
    """Of two users: one is in every cohort, the other is the target."""
    return [[0, 1] if member else [0] for member in is_member]


def _flat(weights):
    return np.concatenate([np.ravel(value) for value in weights.values()])
