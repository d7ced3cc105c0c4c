"""User-level training from a configuration: cohorts, states on disk, resuming, what is refused."""

import copy
import math

import numpy as np
import pytest
import tensorflow as tf

from tests.places import DEMO
from tests.rounding import network_roundings, probable_gamma, standard_errors
from tests.tiers import parameters
from tests.training.stopping import stop_before
from tff_pdp.errors import ConfigError, DataError
from tff_pdp.experiment.build import build_method, experiment_engine
from tff_pdp.experiment.config import load_experiment
from tff_pdp.experiment.examples import Examples
from tff_pdp.privacy.plans.user import USERS, UserPlan
from tff_pdp.training import checkpoint as checkpoints
from tff_pdp.training.client_store.store import ClientStore
from tff_pdp.training.evaluate import load_trained
from tff_pdp.training.record import releases
from tff_pdp.training.record.charges import read_charges
from tff_pdp.training.rounds import evaluate_clients, first_state, run_round
from tff_pdp.training.train import train
from tff_pdp.verification.experiment import verify
from tff_pdp.verification.run_folder import Status

NUM_USERS = 12
ALGORITHMS = {
    "fed_avg": {"learning_rate": 0.1, "local_steps": 2},
    "fed_per": {"learning_rate": 0.1, "local_steps": 2},
    "centaur": {"learning_rate": 0.1, "local_steps": 2, "head_steps": "2 epochs", "adapt_steps": 3},
    "dp_fed_avg_ft": {"local_steps": 2, "adapt_steps": "epoch"},
    "local_only": {"learning_rate": 0.1, "local_steps": 2},
}


@pytest.fixture(scope="module")
def users(tmp_path_factory):
    """A prepared client dataset of twelve users of digits."""
    from beam_pipelines.sources.partition import write_digits_leaf
    from tff_pdp.experiment.prepare import prepare_clients

    folder = tmp_path_factory.mktemp("users")
    write_digits_leaf(folder / "leaf", num_clients=NUM_USERS, concentration=5.0, seed=0)
    config = load_experiment(DEMO, {"output": str(folder), "data.input": str(folder / "leaf")})
    prepare_clients(config)
    return config.clients_folder


@pytest.fixture
def experiment(users, tmp_path):
    """A function that builds a small user-level experiment, under this test's own folder."""

    def build(name="run", **overrides):
        output = tmp_path / name
        output.mkdir(exist_ok=True)
        if not (output / "clients").exists():
            (output / "clients").symlink_to(users)
        settings = {
            "output": str(output),
            "data.input": str(users.parent / "leaf"),
            "model": {"kind": "mlp", "hidden_units": [8]},
            "privacy": {
                "kind": "user",
                "batch_size": 16,
                "clip_norm": 0.5,
                "users_per_round": 4,
                "budgets": {"kind": "one_for_all", "epsilon": 20.0, "delta": 1e-3},
            },
            "training.rounds": 6,
            "training.checkpoint_every": 2,
            "training.evaluate_every": 3,
            "training.test_only_seed": 1,
            "training.client_parallelism": "loop",
            # Overrides change it in place.
            "algorithms": copy.deepcopy(ALGORITHMS),
            "export.algorithm": "centaur",
            "tuning": {},
        }
        return load_experiment(
            DEMO, {**settings, **{key.replace("__", "."): value for key, value in overrides.items()}}
        )

    return build


def leaves(config, name, state):
    store = ClientStore.open(config.algorithm_folder(name) / releases.STORE)
    with store:
        own = store.read(range(NUM_USERS))
    return [np.asarray(leaf) for leaf in tf.nest.flatten((state.server_state["algorithm"], own))]


def test_a_cohort_alone_changes_its_states_and_everyone_is_charged_once_a_round(experiment):
    config = experiment()
    method = build_method(config, "centaur")
    with experiment_engine(config):
        state, data = first_state(method, 1), method.examples("train")
        for number in range(1, 4):
            before = state.client_states.read(range(NUM_USERS))["head"]["dense_1/kernel"]
            state = run_round(method, state, number, data)
            after = state.client_states.read(range(NUM_USERS))["head"]["dense_1/kernel"]
            changed = np.flatnonzero((before != after).any(axis=(1, 2)))
            cohort = method.plan.cohort(number, state.client_ids, state.run_key.cohort_generator)
            np.testing.assert_array_equal(changed, cohort)
            assert 0 < len(cohort) < NUM_USERS
    _, entry = state.ledger.entries
    assert (entry.scope, entry.count) == (USERS, 3)
    assert state.ledger.epsilon(USERS).best < 20


def test_an_empty_cohort_is_noised_like_any_other(experiment, monkeypatch):
    config = experiment()
    method = build_method(config, "fed_avg")
    monkeypatch.setattr(type(method.plan), "cohort", lambda *arguments: np.zeros(0, np.int64))
    with experiment_engine(config):
        first = first_state(method, 1)
        state = run_round(method, first, 1, method.examples("train"))
    moved = [
        np.asarray(new) - np.asarray(old)
        for old, new in zip(
            first.server_state["algorithm"]["weights"].values(),
            state.server_state["algorithm"]["weights"].values(),
            strict=True,
        )
    ]
    draws = np.concatenate([one.ravel() for one in moved])
    mechanism = method.plan.mechanism
    expected = mechanism.noise_multiplier * mechanism.clip_norm / mechanism.expected_cohort
    assert abs(draws.std() / expected - 1) < standard_errors() / math.sqrt(2 * len(draws))


def test_a_run_whose_last_round_had_nobody_verifies(experiment, monkeypatch):
    config = experiment(training__rounds=3, training__checkpoint_every=1)
    real_cohort = UserPlan.cohort

    def cohort(plan, round_number, *others):
        return real_cohort(plan, round_number, *others)[: 0 if round_number == 3 else None]

    monkeypatch.setattr(UserPlan, "cohort", cohort)
    train(config, "fed_per", progress=False)
    found = list(verify(config.algorithm_folder("fed_per")))
    assert {one.status for one in found} == {Status.OK}, found
    with ClientStore.open(config.algorithm_folder("fed_per") / releases.STORE) as store:
        assert store.round_number == 3


@pytest.mark.parametrize(
    ("name", "parallelism", "xla"),
    parameters(
        [
            ("centaur", "loop", "never"),
            ("fed_per", "vectorized", "never"),
            ("fed_avg", "loop", "never"),
            ("fed_avg", "vectorized", "always"),
        ],
        test=[("centaur", "loop", "never"), ("fed_avg", "vectorized", "always")],
    ),
)
def test_a_run_that_failed_midway_resumes_to_the_same_bits(experiment, monkeypatch, name, parallelism, xla):
    settings = {"training__client_parallelism": parallelism, "training__xla": xla}
    whole_config, config = experiment("whole", **settings), experiment("stopped", **settings)
    whole = train(whole_config, name, progress=False)
    with monkeypatch.context() as patch:
        stop_before(patch, 6)
        with pytest.raises(RuntimeError):
            train(config, name, progress=False)
    # Round 5 is in the store, and in no checkpoint.
    with ClientStore.open(config.algorithm_folder(name) / releases.STORE) as store:
        assert store.round_number == 5
    assert checkpoints.load_latest(config.algorithm_folder(name) / "checkpoints").round_number == 4
    choices = read_charges(config.algorithm_folder(name)).choices
    assert set(choices.values()) == ({"compiled"} if xla == "always" else set())
    resumed = train(config, name, resume=True, progress=False)
    assert read_charges(config.algorithm_folder(name)).choices == choices
    assert resumed.ledger.to_json() == whole.ledger.to_json()
    for one, other in zip(leaves(config, name, resumed), leaves(whole_config, name, whole), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_run_that_ended_before_its_states_were_pruned_prunes_them_when_resumed(experiment, monkeypatch):
    config = experiment()
    with monkeypatch.context() as patch:
        patch.setattr(ClientStore, "prune", lambda *arguments: None)
        train(config, "fed_per", progress=False)
    folder = config.algorithm_folder("fed_per")
    oldest = checkpoints.oldest_kept(folder / "checkpoints")
    assert oldest > 0
    train(config, "fed_per", resume=True, progress=False)
    with ClientStore.open(folder / releases.STORE) as store, pytest.raises(DataError, match=f"before round {oldest}"):
        store.rewind(oldest - 1)


def test_what_users_do_for_themselves_does_not_enter_training(experiment):
    """Evaluating twice as often gives the same models."""
    often, seldom = experiment("often", training__evaluate_every=1), experiment("seldom")
    states = {config.output: train(config, "centaur", progress=False) for config in (often, seldom)}
    for one, other in zip(
        leaves(often, "centaur", states[often.output]), leaves(seldom, "centaur", states[seldom.output]), strict=True
    ):
        np.testing.assert_array_equal(one, other)


def test_users_are_evaluated_after_they_adapt(experiment):
    config = experiment()
    train(config, "dp_fed_avg_ft", progress=False)
    method, state = load_trained(config, "dp_fed_avg_ft")
    with experiment_engine(config):
        metrics = evaluate_clients(method, state, method.examples("test"), method.examples("train"))
    state.client_states.close()
    assert list(metrics) == list(method.clients.client_ids)
    personal, shared = (np.array([row[kind]["loss"] for row in metrics.values()]) for kind in ("personal", "global"))
    # By more than is rounded on the way to a mean of losses.
    largest = max(method.clients.num_examples(client_id, "test") for client_id in metrics)
    rounded = 2 * probable_gamma(network_roundings(method.model.init(0), largest))
    assert (np.abs(personal - shared) > rounded * np.maximum(personal, shared)).all()


def test_without_privacy_the_same_cohorts_are_neither_clipped_nor_noised(experiment):
    private = build_method(experiment(), "fed_avg")
    unprotected = {"kind": "none", "unit": "user", "batch_size": 16, "users_per_round": 4}
    config = experiment("without", privacy=unprotected)
    method = build_method(config, "fed_avg")
    assert method.plan.mechanism.noise_multiplier == 0
    assert method.plan.mechanism.clip_norm == math.inf
    assert method.plan.build_ledger() is None
    with experiment_engine(config):
        key = first_state(method, 1).run_key
    ids = method.clients.client_ids
    for number in range(1, 7):
        cohorts = [one.plan.cohort(number, ids, key.cohort_generator) for one in (private, method)]
        np.testing.assert_array_equal(*cohorts)


def test_a_method_that_releases_nothing_trains_everyone_and_costs_nothing(experiment):
    config = experiment()
    state = train(config, "local_only", progress=False)
    assert state.ledger.entries == ()
    assert state.ledger.epsilon(USERS).best == 0


def test_a_warning_says_when_the_noise_drowns_the_updates(experiment, capsys):
    train(
        experiment(privacy__budgets={"kind": "one_for_all", "epsilon": 0.1, "delta": 1e-3}), "fed_avg", progress=False
    )
    said = capsys.readouterr().err
    assert "fed_avg: warning: The noise on a round's mean is about" in said
    train(experiment("private"), "local_only", progress=False)
    assert "warning" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "name", "message"),
    [
        ({"privacy__kind": "silo_example", "privacy__users_per_round": None}, "centaur", "it is for users"),
        ({"algorithms": {"mocha": {}}, "export__algorithm": "mocha"}, "mocha", "it is for silos"),
        ({"algorithms": {"ifca": {}}, "export__algorithm": "ifca"}, "ifca", "it is for silos"),
        ({"training__weighting": "num_examples"}, "fed_avg", "is for silos"),
        ({"training__weighting": "budget"}, "fed_avg", "training.weighting budget is for silos"),
        ({"training__weighting": "budget_softmax"}, "fed_avg", "training.weighting budget_softmax is for silos"),
        ({"algorithms": {"mr_mtl": {}}, "export__algorithm": "mr_mtl"}, "mr_mtl", "every client in every round"),
        ({"algorithms": {"ditto": {}}, "export__algorithm": "ditto"}, "ditto", "every client in every round"),
        (
            {"privacy__num_examples": {"kind": "noised", "epsilon": 0.1}},
            "fed_avg",
            "unknown key privacy.num_examples",
        ),
        ({"privacy__sampler": "paper_shuffled"}, "fed_avg", "unknown key privacy.sampler"),
        ({"privacy__noise_calibration": "paper_rdp"}, "fed_avg", "unknown key privacy.noise_calibration"),
        ({"privacy__kind": "silo_example"}, "fed_avg", "unknown key privacy.users_per_round"),
        ({"privacy__users_per_round": 13}, "fed_avg", "at most 12"),
        ({"algorithms__centaur__head_steps": "few epochs"}, "centaur", "5 epochs"),
    ],
)
def test_what_does_not_fit_users_is_refused_by_name(experiment, overrides, name, message):
    with pytest.raises(ConfigError, match=message):
        build_method(experiment(**overrides), name)


def test_capped_weights_take_the_counts_for_public(experiment):
    config = experiment(training__weighting="paper_capped_num_examples", training__weight_cap=90)
    method = build_method(config, "fed_avg")
    assert method.plan.claim == "formal-conditional"
    assert "number of examples of each user" in method.plan.claim_reason
    sizes = np.array(list(method.amounts.values()))
    total = np.minimum(sizes / 90, 1).sum()
    np.testing.assert_allclose(method.plan.mechanism.expected_cohort, 4 / 12 * total)
    assert min(sizes) < 90 < max(sizes), "this test needs users on both sides of the cap"
    with experiment_engine(config):
        state = run_round(method, first_state(method, 1), 1, method.examples("train"))
    assert all(np.isfinite(leaf).all() for leaf in tf.nest.flatten(state.server_state["algorithm"]))


def test_states_and_checkpoints_are_for_their_owner_alone(experiment):
    config = experiment()
    train(config, "centaur", progress=False)
    folder = config.algorithm_folder("centaur")
    private = [folder / releases.STORE, *(folder / "checkpoints").glob("round_*")]
    assert len(private) == 3
    assert {path.stat().st_mode & 0o077 for path in private} == {0}


def test_a_lost_store_is_named(experiment):
    config = experiment()
    train(config, "centaur", progress=False)
    store = config.algorithm_folder("centaur") / releases.STORE
    store.rename(store.with_name("elsewhere"))
    with pytest.raises(DataError, match=str(store)):
        load_trained(config, "centaur")


def test_examples_are_padded_alike_whoever_is_asked_for(experiment):
    method = build_method(experiment(), "fed_avg")
    examples = method.examples("train")
    everyone, some = examples.all(), examples.select([7, 2, 9])
    for place, client in enumerate([7, 2, 9]):
        for key in ("x", "y", "num_examples"):
            np.testing.assert_array_equal(some[place][key], everyone[client][key])
    assert len(Examples(method.clients, "train", method.model).select([])) == 0


def test_a_cohort_depends_on_the_key_and_the_round_alone(experiment):
    method = build_method(experiment(), "fed_avg")
    ids = method.clients.client_ids
    with experiment_engine(experiment()):
        key = first_state(method, 1).run_key
        other = first_state(method, 2).run_key
    cohorts = [tuple(method.plan.cohort(number, ids, key.cohort_generator)) for number in range(1, 9)]
    assert cohorts == [tuple(method.plan.cohort(number, ids, key.cohort_generator)) for number in range(1, 9)]
    assert len(set(cohorts)) > 4
    assert cohorts != [tuple(method.plan.cohort(number, ids, other.cohort_generator)) for number in range(1, 9)]
