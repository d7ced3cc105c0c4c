"""Noised sums of users' releases as TFF computations: clip, noise, weights, constants, and what may never be bare."""

import collections
import dataclasses
import math

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.privacy.mechanisms.grid_support import on_grid
from tests.rounding import ELEMENTARY, assert_within, gamma, standard_errors
from tests.tiers import parameters
from tff_pdp import _tff
from tff_pdp.algorithms.base import Claims
from tff_pdp.algorithms.minibatch import build_minibatch
from tff_pdp.experiment.hparams import build_algorithm
from tff_pdp.experiment.run_key import RunKey
from tff_pdp.models.dense import build_mlp
from tff_pdp.privacy.accounting.accountants import Adjacency
from tff_pdp.privacy.mechanisms.parameters import UserMechanism
from tff_pdp.privacy.mechanisms.user_noise import AdaptiveClip, FixedClip, TreeNoise, UserSum
from tff_pdp.privacy.plans.user import UserPlan
from tff_pdp.processes.aggregation import build_plain_aggregation, build_user_aggregation
from tff_pdp.processes.client_work import build_client_work
from tff_pdp.processes.compose import client_params_columns, client_params_type
from tff_pdp.training.checkpoint import Checkpoint, load_latest, save

KEY = RunKey.from_test_seed(11)
HEAD = ("output/kernel", "output/bias")
# Names and shapes that flattening could mix up: sizes differ, and the order is not that of the alphabet.
SHAPES = {"update": {"z": (2, 3), "a": (4,), "m": ()}, "extra": {"w": (3, 1)}}
NUM_VALUES = 14
KINDS = [FixedClip(), AdaptiveClip(count_stddev=1.0), TreeNoise()]


@dataclasses.dataclass(frozen=True)
class Method:
    """As much of an algorithm as an aggregation needs to know."""

    name: str = "some method"
    released: dict = dataclasses.field(default_factory=lambda: dict.fromkeys(SHAPES, "mean"))
    public: dict = dataclasses.field(default_factory=dict)
    num_clients: int | None = None
    claims: Claims = dataclasses.field(default_factory=Claims)


@pytest.fixture(scope="module")
def engine():
    """One is enough here, but for the test that compares all of them."""
    from tff_pdp.engines.running import build_engine

    engine = build_engine("inprocess", client_parallelism="loop")
    yield engine
    engine.close()


def release(values):
    """What a user releases, of 14 numbers in the order of SHAPES."""
    values, start, released = np.asarray(values, np.float32), 0, collections.OrderedDict()
    for name, shapes in SHAPES.items():
        released[name] = collections.OrderedDict()
        for part, shape in shapes.items():
            size = math.prod(shape)
            released[name][part] = values[start : start + size].reshape(shape)
            start += size
    return released


def flat(aggregates):
    """The inverse: each value where it was, found by its name."""
    return np.concatenate([np.ravel(aggregates[name][part]) for name, shapes in SHAPES.items() for part in shapes])


RELEASED_TYPE = _tff.to_type(
    collections.OrderedDict(
        (name, collections.OrderedDict((part, _tff.TensorType(np.float32, shape)) for part, shape in shapes.items()))
        for name, shapes in SHAPES.items()
    )
)


def plan_of(clip_norm=1.0, noise_multiplier=0.0, noise=None, cohort=5.0, rate=0.1, num_values=NUM_VALUES, **changes):
    return UserPlan(
        unit="user",
        adjacency=Adjacency.ADD_OR_REMOVE_ONE,
        claim="none",
        claim_reason="",
        budgets={},
        rounds=100,
        batch_size=4,
        mechanism=UserMechanism(clip_norm, noise_multiplier, rate, cohort),
        noise=noise or FixedClip(),
        num_users=50,
        is_constant=False,
        num_released=num_values,
        num_noised=num_values,
        **changes,
    )


def started(state, plan, seeds):
    """The state of an aggregation, with a plan's mechanism in it."""
    return plan.start({"aggregation": state}, seeds)["aggregation"]


class Server:
    """One aggregation of one method, through rounds. Everything it does needs an engine."""

    def __init__(self, plan, released_type=RELEASED_TYPE, method=None, is_weighted=False, seeds=None):
        names = ["weight"] if is_weighted else []
        names += ["clip_norm"] if is_weighted or plan.noise_on_own_support else []
        names += ["noise_share"] if plan.noise_on_own_support else []
        fields = collections.OrderedDict((name, _tff.TensorType(np.float32)) for name in names)
        fields["seed"] = _tff.TensorType(np.int64, [2])
        self.plan, self._names = plan, names
        self.aggregation = build_user_aggregation(
            method or Method(claims=Claims(noise_on_own_support=plan.noise_on_own_support)),
            released_type,
            _tff.to_type(fields),
            UserSum(plan.noise, plan.mechanism.sampling_rate),
            is_weighted=is_weighted,
        )
        self.seeds = KEY.server_seeds() if seeds is None else seeds
        self.start()

    def start(self, plan=None, seeds=None):
        self.plan = plan or self.plan
        self.state = started(self.aggregation.initialize(), self.plan, self.seeds if seeds is None else seeds)

    def round(self, released, weights=None, number=1):
        """The aggregates of a cohort."""
        params = []
        for place in range(len(released)):
            values = {
                "weight": np.float32(1.0 if weights is None else weights[place]),
                "clip_norm": np.float32(self.plan.mechanism.clip_norm),
                "noise_share": np.float32(self.plan.noise_share),
            }
            own = collections.OrderedDict((name, values[name]) for name in self._names)
            own["seed"] = KEY.client_seed(number, str(place))
            params.append(own)
        self.state, aggregates = self.aggregation.next(self.state, list(released), params)
        return aggregates


@pytest.fixture(scope="module")
def server(engine):
    """A function for a server's aggregation of 14 values, compiled once for each kind of noise."""
    built = {}

    def get(plan, is_weighted=False):
        key = (plan.noise, plan.mechanism.sampling_rate, is_weighted, plan.noise_on_own_support)
        if key not in built:
            built[key] = Server(plan, is_weighted=is_weighted)
        built[key].start(plan)
        return built[key]

    with engine.install():
        yield get


def users(number, seed=0, scale=1.0):
    return scale * np.random.default_rng(seed).normal(size=(number, NUM_VALUES)).astype(np.float32)


# --- means


@pytest.mark.parametrize("noise", [FixedClip(), TreeNoise()])
def test_without_noise_and_clip_means_are_sums_over_the_constant_each_under_its_name(server, noise):
    one, terms = server(plan_of(math.inf, noise=noise)), 0.0
    for seed in range(3):
        rows = users(3, seed, scale=1e4).astype(np.float64)
        terms += np.abs(rows).sum(axis=0) / 5.0
        aggregates = one.round([release(row) for row in rows])
        assert list(aggregates) == list(SHAPES)
        assert {name: {part: np.shape(value) for part, value in own.items()} for name, own in aggregates.items()} == (
            SHAPES
        )
        # Of a tree, differences of running sums over all rounds so far.
        assert_within(flat(aggregates), rows.sum(axis=0) / 5.0, gamma(3 * 3 + 3) * terms)


def test_the_realised_size_of_a_cohort_does_not_enter(server):
    one = server(plan_of(math.inf, cohort=8.0))
    row = users(1)[0]
    for size in (1, 2, 5):
        np.testing.assert_allclose(flat(one.round([release(row)] * size)), row * size / 8.0, rtol=gamma(size + 2))
    np.testing.assert_array_equal(flat(one.round([])), 0.0)


def test_a_clipped_sum_is_that_of_records_clipped_over_all_names_jointly(server):
    one = server(plan_of(2.5))
    rows = users(6).astype(np.float64)
    norms = np.linalg.norm(rows, axis=1)
    assert (norms > 2.5).any()
    clipped = rows * np.minimum(1.0, 2.5 / norms)[:, np.newaxis]
    # Float32 once, and a quotient.
    bounds = on_grid(2.5, 0.0, len(rows)) / 5 + gamma(2) * np.abs(clipped.sum(axis=0)) / 5
    assert_within(flat(one.round([release(row) for row in rows])), clipped.sum(axis=0) / 5, bounds)


NUMBERS = st.floats(-(2.0**100), 2.0**100, width=32) | st.sampled_from([0.0, math.nan, math.inf, -math.inf])


@settings(max_examples=40, deadline=None)
@given(
    others=st.lists(st.lists(st.floats(-3, 3, width=32), min_size=NUM_VALUES, max_size=NUM_VALUES), max_size=3),
    one_more=st.lists(NUMBERS, min_size=NUM_VALUES, max_size=NUM_VALUES),
    clip_norm=st.sampled_from([0.01, 1.0, 30.0]),
)
def test_one_user_more_moves_the_sum_by_at_most_the_clip_norm(server, others, one_more, clip_norm):
    for noise in KINDS:
        one = server(plan_of(clip_norm, noise=noise, cohort=1.0))
        without = flat(one.round([release(row) for row in others])).astype(np.float64)
        one.start()
        sums = flat(one.round([release(row) for row in [*others, one_more]]))
        assert np.isfinite(sums).all()
        # Two sums of records that are no longer than the clip norm, float32 in the end, and quotients.
        rounded = 2 * gamma(2) * (len(others) + 1)
        assert np.linalg.norm(sums - without) <= np.float32(clip_norm) * (1 + rounded)


# --- noise


@pytest.mark.parametrize(
    ("noise", "z"),
    [
        (FixedClip(), 3.0),
        # Its count has noise of 5, and its clip norm as good as stays.
        (AdaptiveClip(learning_rate=1e-6, count_stddev=1.0), (1 / 9 - 1 / 100) ** -0.5),
        # Every round is a tree.
        (TreeNoise(), 3.0),
    ],
)
def test_an_empty_cohort_is_noise_alone_on_every_value(server, noise, z):
    one = server(plan_of(0.5, 3.0, noise, rate=1.0))
    draws = np.stack([flat(one.round([])) for _ in range(150)])
    stddev = z * 0.5 / 5
    assert abs(draws.std() - stddev) < 3 * stddev / math.sqrt(2 * draws.size)
    assert abs(draws.mean()) < 3 * stddev / math.sqrt(draws.size)
    assert np.abs(draws.std(axis=0) - stddev).max() < 4 * stddev / math.sqrt(2 * len(draws))
    assert np.abs(np.corrcoef(draws.T)[np.triu_indices(NUM_VALUES, 1)]).max() < 4.5 / math.sqrt(len(draws))
    assert abs(np.corrcoef(draws[1:].ravel(), draws[:-1].ravel())[0, 1]) < 4 / math.sqrt(draws.size)


def test_noise_is_added_to_the_clipped_sum_and_does_not_depend_on_it(server):
    rows, plan = users(4), plan_of(0.5, 3.0)
    one = server(plan)
    noise = [flat(one.round([])) for _ in range(2)]
    one.start()
    noised = [flat(one.round([release(row) for row in rows])) for _ in range(2)]
    one.start(plan_of(0.5, 0.0))
    clean = flat(one.round([release(row) for row in rows]))
    assert np.linalg.norm(clean) > 0.05
    for number in range(2):
        # Grids are as coarse as the noise. Float32 in the end, and quotients.
        rounded = gamma(2) * (np.abs(noised).max() + np.abs(noise).max() + np.abs(clean).max())
        bound = (on_grid(0.5, 1.5, len(rows)) + on_grid(0.5, 0.0, len(rows))) / 5 + rounded
        np.testing.assert_allclose(noised[number].astype(np.float64) - noise[number], clean, rtol=0, atol=bound)
    assert not np.isclose(noise[0], noise[1]).any()


def test_other_seeds_are_other_noise(server):
    one = server(plan_of(1.0, 1.0))
    first = flat(one.round([]))
    one.start(seeds=RunKey.from_test_seed(12).server_seeds())
    assert not np.isclose(first, flat(one.round([]))).any()


@pytest.mark.parametrize("noise", KINDS)
def test_before_it_is_started_all_results_are_nan(server, noise):
    one = server(plan_of(noise=noise))
    one.state = one.aggregation.initialize()
    for _ in range(2):
        assert np.isnan(flat(one.round([release(row) for row in users(2)]))).all()
    # One half of it is not enough, whichever it is.
    first, ready = one.aggregation.initialize(), started(one.aggregation.initialize(), one.plan, one.seeds)
    for half in ({**first, "cohort": ready["cohort"]}, {**ready, "cohort": first["cohort"]}):
        one.state = half
        assert np.isnan(flat(one.round([release(row) for row in users(2)]))).all()


@pytest.mark.parametrize("noise", parameters(KINDS, test=[TreeNoise()]))
def test_engines_agree_on_noised_rounds_and_on_an_empty_one(engines, noise):
    """Three rounds of a tree of two, too."""
    plan = plan_of(0.5, 1.5, noise, rate=0.5)
    results = {}
    for name, engine in engines.items():
        with engine.install():
            one = Server(plan)
            cohorts = [users(3, 1), users(0), users(5, 2), users(1, 3)]
            results[name] = [flat(one.round([release(row) for row in rows])) for rows in cohorts]
    for name in ("loop", "vectorized"):
        # What logarithms and sines round of the noise, an exponential of the clip norm, and sums, in each round.
        bound = 2 * gamma(len(cohorts) * (4 * ELEMENTARY + 16)) * np.abs(results["native"]).max()
        np.testing.assert_allclose(results[name], results["native"], atol=bound)


@pytest.mark.parametrize("noise", KINDS)
def test_a_saved_state_goes_on_to_the_same_bits(server, noise, tmp_path):
    """Noise of rounds to come included: for the same seeds, a round that is run again is the same release."""
    one = server(plan_of(0.5, 1.5, noise, rate=0.4))
    for seed in range(2):
        one.round([release(row) for row in users(3, seed)])
    state = Checkpoint(
        round_number=2,
        server_state={"aggregation": one.state},
        client_ids=(),
        client_states=[],
        ledger=None,
        run_key=KEY,
        config_hash="hash",
    )
    save(tmp_path, state)
    whole = [flat(one.round([release(row) for row in users(2, seed)])) for seed in range(4)]
    one.state = load_latest(tmp_path).server_state["aggregation"]
    again = [flat(one.round([release(row) for row in users(2, seed)])) for seed in range(4)]
    np.testing.assert_array_equal(whole, again)


# --- weights, and shares of the noise


def test_a_weight_multiplies_what_is_left_by_the_clip(server):
    one = server(plan_of(0.5), is_weighted=True)
    short, long = (users(2, scale=scale)[place].astype(np.float64) for place, scale in enumerate((0.02, 50.0)))
    weights = [0.25, 0.75]
    expected = 0.25 * short + 0.75 * 0.5 * long / np.linalg.norm(long)
    # Of records no longer than a half, that are clipped by themselves and with their weights.
    bound = on_grid(0.5, 0.0, 2) + 0.5 * gamma(6)
    found = flat(one.round([release(short), release(long)], weights))
    np.testing.assert_allclose(found, expected / 5, rtol=0, atol=bound / 5)
    alone = np.linalg.norm(flat(one.round([release(long)], [0.75]))) * 5
    assert alone == pytest.approx(0.375, abs=math.sqrt(NUM_VALUES) * bound)


def test_a_weight_above_one_is_clipped_away(server):
    one = server(plan_of(0.5), is_weighted=True)
    assert np.linalg.norm(flat(one.round([release(users(1)[0])], [100.0]))) * 5 <= 0.5


def test_shares_of_noise_lie_where_a_users_own_values_are(server):
    plan = plan_of(0.5, 3.0, cohort=4.0, noise_on_own_support=True)
    one = server(plan)
    row = users(1)[0]
    row[[1, 5, 13]] = 0.0
    clipped = 0.5 * row / np.linalg.norm(row)
    draws = np.stack([4 * flat(one.round([release(row)], number=number)) - clipped for number in range(400)])
    np.testing.assert_array_equal(draws[:, row == 0], 0.0)
    noise = draws[:, row != 0]
    share = 3.0 * 0.5 / math.sqrt(4.0)
    assert abs(noise.std() - share) < 3 * share / math.sqrt(2 * noise.size)
    assert abs(noise.mean()) < 3 * share / math.sqrt(noise.size)
    # The server adds nothing.
    np.testing.assert_array_equal(flat(one.round([])), 0.0)


def test_two_users_add_noise_of_their_own(server):
    one = server(plan_of(0.5, 3.0, cohort=1.0, noise_on_own_support=True))
    rows = users(2)
    both = np.stack([flat(one.round([release(row) for row in rows], number=number)) for number in range(200)])
    alone = np.stack([flat(one.round([release(rows[0])], number=number)) for number in range(200)])
    # Two variances of as many draws.
    by_chance = standard_errors() * math.sqrt(2 * 2 / alone.size)
    assert both.var(axis=0).mean() / alone.var(axis=0).mean() == pytest.approx(2.0, rel=by_chance)


# --- what is never bare: the structure, for methods whose masks depend on data

MODEL = build_mlp((2, 2, 1), 3, (12,))
NUM_CLIENTS = 3


def client_releases(algorithm):
    """What clients of different data release in one round: a nest of arrays for each."""
    rng = np.random.default_rng(0)
    message = algorithm.broadcast(
        algorithm.init_server(
            collections.OrderedDict((name, tf.constant(array)) for name, array in MODEL.init(0).items())
        )
    )
    estimator = build_minibatch(MODEL, 8)
    columns = client_params_columns(
        algorithm,
        estimator,
        mechanism={},
        hparams={**dict.fromkeys(algorithm.step_hparams, 3), "learning_rate": 1.0},
        seeds=np.stack([KEY.client_seed(1, str(client)) for client in range(NUM_CLIENTS)]),
    )
    work = tf.function(build_client_work(algorithm, estimator))
    released = []
    for client in range(NUM_CLIENTS):
        data = collections.OrderedDict(
            x=tf.constant(rng.normal(size=(8, 2, 2, 1)), tf.float32),
            y=tf.constant(np.full(8, client)),
            num_examples=tf.constant(8),
        )
        params = tf.nest.map_structure(lambda column, place=client: tf.constant(column[place]), columns)
        result = work(message, algorithm.init_client(message), data, params)["released"]
        released.append(tf.nest.map_structure(np.asarray, collections.OrderedDict(result)))
    return released


def leaves(nest):
    return np.concatenate([np.ravel(leaf) for leaf in tf.nest.flatten(nest)])


def coordinates(**arguments):
    """Of DP-pFedDSU: which coordinates of a mean have no noise, with and without client 0, and which give it away.

    Those that give it away are always exactly zero without the client, and never with it.
    """
    given = {"sparsity": 0.2, "sparse_layers": 2, **arguments}
    algorithm, _ = build_algorithm("dp_pfed_dsu", given, num_clients=NUM_CLIENTS, rounds=1, head=MODEL.head)
    released = client_releases(algorithm)
    assert all(leaves(one).any() for one in released)
    own_support = algorithm.claims.noise_on_own_support
    plan = plan_of(0.5, 1.0, cohort=2.0, num_values=len(leaves(released[0])), noise_on_own_support=own_support)
    types = tf.nest.map_structure(lambda leaf: _tff.TensorType(np.float32, leaf.shape), released[0])
    server = Server(plan, _tff.to_type(types), algorithm)
    everyone, others = (
        np.stack([leaves(server.round([released[client] for client in cohort], number=n)) for n in range(12)])
        for cohort in ((0, 1, 2), (1, 2))
    )
    gives_away = (others == 0).all(axis=0) & (everyone != 0).all(axis=0)
    return everyone.std(axis=0) == 0, others.std(axis=0) == 0, gives_away


@pytest.mark.parametrize("mask_source", ["server", "client"])
def test_a_sound_mask_leaves_no_value_without_noise(engine, mask_source):
    with engine.install():
        bare, bare_without, gives_away = coordinates(mask_source=mask_source)
    assert not bare.any()
    assert not bare_without.any()
    assert not gives_away.any()


def test_the_papers_mask_is_found_to_give_a_client_away(engine):
    with engine.install():
        bare, bare_without, gives_away = coordinates(mask_source="paper_client_mask")
    # Nobody's mask has some of the values, and some are in none but the client's.
    assert bare.any()
    assert (bare_without & ~bare).any()
    np.testing.assert_array_equal(gives_away, bare_without & ~bare)


# --- what is refused, and the plain aggregation


def test_noised_sums_are_for_means():
    method = Method(released={"update": "mean", "extra": "sum"})
    with pytest.raises(ValueError, match="noised sums need releases that are all means"):
        Server(plan_of(), method=method)


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("own_support", [False, True])
def test_parameters_of_clients_have_what_a_sum_asks_for(is_weighted, own_support):
    algorithm, _ = build_algorithm(
        "dp_pfed_dsu",
        {"mask_source": "paper_client_mask"} if own_support else {},
        num_clients=3,
        rounds=1,
        head=MODEL.head,
    )
    params_type = client_params_type(
        algorithm, build_minibatch(MODEL, 4), is_weighted=is_weighted, user_sum=UserSum(FixedClip(), 0.1)
    )
    released_type = _tff.to_type(collections.OrderedDict(update=_tff.TensorType(np.float32, [3])))
    aggregation = build_user_aggregation(
        algorithm, released_type, params_type, UserSum(FixedClip(), 0.1), is_weighted=is_weighted
    )
    names = [name for name, _ in _tff.iter_elements(params_type)]
    assert ("weight" in names) == is_weighted
    assert ("clip_norm" in names) == (is_weighted or own_support)
    assert ("noise_share" in names) == own_support
    assert aggregation.aggregates_type == released_type


def test_without_users_to_protect_means_and_sums_are_plain(engine):
    method = Method(released={"update": "mean", "extra": "sum"})
    params_type = _tff.to_type(collections.OrderedDict(seed=_tff.TensorType(np.int64, [2])))
    aggregation = build_plain_aggregation(method, RELEASED_TYPE, params_type)
    rows = users(4)
    params = [collections.OrderedDict(seed=np.zeros(2, np.int64))] * 4
    with engine.install():
        _, aggregates = aggregation.next(aggregation.initialize(), [release(row) for row in rows], params)
    expected = np.array([*rows.mean(axis=0, dtype=np.float64)[:11], *rows.sum(axis=0, dtype=np.float64)[11:]])
    assert_within(flat(aggregates), expected, gamma(len(rows) + 1) * np.abs(rows).sum(axis=0))


@dataclasses.dataclass(frozen=True)
class MethodOfSilos(Method):
    """As much of an algorithm as the aggregation of rows and of public scalars needs to know."""

    released: dict = dataclasses.field(default_factory=lambda: {"row": "rows", "update": "mean"})
    public: dict = dataclasses.field(default_factory=lambda: {"steps": "weighted_mean"})
    num_clients: int = 4
    step_hparams: tuple = ("local_steps",)

    def public_values(self, hparams):
        return {"steps": hparams["local_steps"].count}


@pytest.mark.parametrize("engine_name", ["native", "loop", "vectorized"])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_rows_stand_in_their_clients_places_and_public_scalars_are_means(engines, engine_name, is_weighted):
    row_type = collections.OrderedDict(w=_tff.TensorType(np.float32, [2]), b=_tff.TensorType(np.float32))
    released_type = _tff.to_type(collections.OrderedDict(row=row_type, update=_tff.TensorType(np.float32)))
    hparams = collections.OrderedDict(client_index=np.int32, local_steps=np.int32)
    fields = collections.OrderedDict(hparams=hparams, **({"weight": np.float32} if is_weighted else {}))
    aggregation = build_plain_aggregation(MethodOfSilos(), released_type, _tff.to_type(fields), is_weighted=is_weighted)

    def release(place):
        row = collections.OrderedDict(w=np.array([place, -place], np.float32), b=np.float32(10 + place))
        return collections.OrderedDict(row=row, update=np.float32(place))

    def params(place, steps, weight):
        own = collections.OrderedDict(client_index=np.int32(place), local_steps=np.int32(steps))
        return collections.OrderedDict(hparams=own, **({"weight": np.float32(weight)} if is_weighted else {}))

    # Two of four take part, not in their order.
    told = [params(3, 1, 0.5), params(1, 7, 1.5)]
    with engines[engine_name].install():
        _, found = aggregation.next(aggregation.initialize(), [release(3), release(1)], told)
    np.testing.assert_array_equal(found["row"]["present"], [0, 1, 0, 1])
    np.testing.assert_array_equal(found["row"]["rows"]["w"], [[0, 0], [1, -1], [0, 0], [3, -3]])
    np.testing.assert_array_equal(found["row"]["rows"]["b"], [0, 11, 0, 13])
    assert float(found["update"]) == 2.0
    assert float(found["steps"]) == (0.5 * 1 + 1.5 * 7) / 2 if is_weighted else 4.0


def test_users_tell_nothing_beside_their_noised_sums():
    params_type = _tff.to_type(collections.OrderedDict(seed=_tff.TensorType(np.int64, [2])))
    with pytest.raises(ValueError, match="noised sums need releases that are all means"):
        build_user_aggregation(
            Method(public={"steps": "weighted_mean"}), RELEASED_TYPE, params_type, UserSum(FixedClip(), 0.1)
        )
