"""The whole search: what it charges, what it selects, what it leaves behind, and what it refuses."""

import dataclasses
import itertools
import json
import math
import stat
from fractions import Fraction

import dp_accounting
import numpy as np
import pytest
import tensorflow as tf
from dp_accounting import dp_event

from tests.rounding import ELEMENTARY, gamma, standard_errors
from tff_pdp.cli import main
from tff_pdp.errors import ConfigError
from tff_pdp.experiment.build import build_method, experiment_engine
from tff_pdp.experiment.run_key import RunKey
from tff_pdp.models.dense import build_linear, build_linear_regression
from tff_pdp.personal_models.trained_clients import trained_clients
from tff_pdp.privacy.accounting.accountants import epsilon_bounds
from tff_pdp.privacy.mechanisms.exact_draws import GRID_BITS, whole_steps
from tff_pdp.privacy.plans.plan import DRAWN_NOISE
from tff_pdp.training.evaluate import evaluate_experiment, load_trained
from tff_pdp.training.record.releases import all_releases
from tff_pdp.training.rounds import first_state
from tff_pdp.training.search import runs as searching
from tff_pdp.training.search import tune as tuning
from tff_pdp.training.search.tune import search_costs, tune
from tff_pdp.training.train import train

VALUES = {"prox_weight": [0.1, 10], "learning_rate": [0.05, 0.3]}
SEARCH = {"algorithm": "mr_mtl", "values": VALUES, "mean_runs": 3.0, "score_noise_multiplier": 10.0}
SCORE = dp_event.GaussianDpEvent(10.0)
# Relative, of epsilon by Renyi differential privacy: some 16 sums and products, and logarithms of the number of runs,
# its parameter, delta and the order. Two computations may take the parts of a run in another order.
REPEATED = 2 * gamma(16 + 5 * ELEMENTARY, np.float64)


@pytest.fixture
def searched(experiment):
    """A function that builds a small experiment with a search."""

    def build(name="run", search=None, **overrides):
        # Batches of all examples: accountants are many times as fast without sampling.
        settings = {"tuning__search": {**SEARCH, **(search or {})}, "training__rounds": 3, "privacy__batch_size": 9999}
        settings.update(overrides)
        return experiment(name, **settings)

    return build


def step_event(method, client_id):
    mechanism = method.plan.mechanisms[client_id]
    assert mechanism.sampling_rate == 1.0
    return dp_event.GaussianDpEvent(mechanism.noise_multiplier)


def leaves(values):
    return [np.asarray(leaf) for leaf in tf.nest.flatten(values)]


def assert_same(one, other):
    for first, second in zip(leaves(one), leaves(other), strict=True):
        np.testing.assert_array_equal(first, second)


@pytest.fixture
def watched(monkeypatch):
    """Every repetition that is made: run, place, state and noisy score, in the order of the runs."""
    made = []

    def watching(method, search, pivot, run_key, run, places, states, validation):
        scores = searching.noisy_scores(method, search, pivot, run_key, run, places, states, validation)
        made.extend(
            {"run": run, "place": place, "state": leaves(state), "score": score}
            for place, state, score in zip(places, states, scores, strict=True)
        )
        return scores

    monkeypatch.setattr(tuning, "noisy_scores", watching)
    return made


def fix_numbers(monkeypatch, numbers):
    monkeypatch.setattr(tuning, "numbers_of_runs", lambda *arguments: numbers)


def test_each_silo_selects_the_best_of_its_runs_and_leaves_no_trace_of_the_others(searched, monkeypatch, watched):
    config = searched()
    fix_numbers(monkeypatch, [1, 4, 2])
    tuned = tune(config, "mr_mtl", progress=False)
    assert [(one["run"], one["place"]) for one in watched] == [(1, 0), (1, 1), (1, 2), (2, 1), (2, 2), (3, 1), (4, 1)]
    for place, client_id in enumerate(tuned.state.client_ids):
        best = max((one for one in watched if one["place"] == place), key=lambda one: one["score"])
        assert_same(leaves(tuned.state.client_states[place]), best["state"])
        assert tuned.selected[client_id]["noisy_score"] == best["score"]
        tried = searching.candidate_of(tuned.search, tuned.state.run_key, client_id, best["run"])
        assert tuned.selected[client_id]["hparams"] == tried
    assert len({one["score"] for one in watched}) == 7
    folder = config.algorithm_folder("mr_mtl")
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    newest = {f"checkpoints/round_000003/{name}" for name in ("state.npz", "checkpoint.json", "run_key.json")}
    assert found == {"config.json", "metrics.jsonl", "selected.json", "charges.jsonl", "charges.head", *newest}
    assert (folder / "metrics.jsonl").read_text() == ""
    text = "".join(path.read_text() for path in folder.rglob("*.json"))
    written = {one["score"] for one in watched if repr(one["score"]) in text}
    assert written == {one["noisy_score"] for one in tuned.selected.values()}
    again = tune(config, "mr_mtl", resume=True, progress=False)
    assert_same(again.state.client_states, tuned.state.client_states)
    assert (again.selected, again.costs) == (tuned.selected, tuned.costs)


def test_the_ledger_holds_the_whole_search_within_the_budget_and_the_method_can_be_evaluated(searched):
    overrides = {"training__test_only_seed": None, "tuning__configurations_tried": 1, "tuning__tuned": []}
    config = searched(**overrides)
    tuned = tune(config, "mr_mtl", progress=False)
    method, state = load_trained(config, "mr_mtl")
    assert not state.run_key.is_test_only
    for client_id, budget in method.plan.budgets.items():
        training = dp_event.SelfComposedDpEvent(step_event(method, client_id), 3)
        run = dp_event.ComposedDpEvent([training, SCORE])
        search = dp_event.RepeatAndSelectDpEvent(run, 3.0, 1.0)
        everything = dp_accounting.ComposedDpEvent([training, search, method.plan.drawn_noise[client_id]])
        by_hand = epsilon_bounds(everything, budget.delta).best
        assert state.ledger.epsilon(client_id).best == pytest.approx(by_hand, rel=REPEATED, abs=0)
        assert 0.999 * budget.epsilon < by_hand <= budget.epsilon
    summary = evaluate_experiment(config, ["mr_mtl"])
    assert summary["privacy"]["claim"] == "formal-conditional"
    assert summary["silos"][0]["epsilon_spent"] == tuned.costs["silo_00"].total
    json.dumps(summary, allow_nan=False)
    report = (config.algorithm_folder("mr_mtl").parent / "report.html").read_text()
    assert "Searched privately: prox_weight and learning_rate of MR-MTL." in report
    assert "random number of runs (geometric, 3 on average)" in report
    with experiment_engine(config):
        weights = trained_clients(method, state).weights_by_id()
    assert_same([weights[client_id] for client_id in state.client_ids], [one["weights"] for one in state.client_states])


def test_the_pivot_run_is_a_training_with_the_methods_own_hyper_parameters(searched, monkeypatch):
    """Who repeats with those, and draws the same batches and noise, gets the pivot run's model."""
    config = searched(search={"values": {"prox_weight": [1.0]}})
    own_seeds = RunKey.client_seeds
    monkeypatch.setattr(RunKey, "client_seeds", lambda self, number, ids, run=0: own_seeds(self, number, ids))
    fix_numbers(monkeypatch, [1, 1, 1])
    tuned = tune(config, "mr_mtl", progress=False)
    method = build_method(config, "mr_mtl")
    with experiment_engine(config):
        first, data = first_state(method, 1), method.client_data("train")
        pivot = searching.run_pivot(method, method.plan.search, first, data, range(1, 4))
    assert len(pivot.server_states) == 4
    assert_same(tuned.state.server_state, pivot.server_states[-1])
    assert_same(tuned.state.client_states, list(pivot.client_states))
    for earlier, later in itertools.pairwise(pivot.server_states):
        assert any((one != other).any() for one, other in zip(leaves(earlier), leaves(later), strict=True))


def test_a_repetition_trains_with_what_it_tries(searched, monkeypatch):
    """At a learning rate of zero the weights stay where they started, while the pivot run moves."""
    fix_numbers(monkeypatch, [1, 1, 1])
    tuned = tune(searched(search={"values": {"learning_rate": [0.0]}}), "mr_mtl", progress=False)
    start = tuned.method.model.init(0)
    for client_state in tuned.state.client_states:
        assert_same([client_state["weights"][name] for name in start], list(start.values()))
    moved = tuned.state.server_state["algorithm"]["mean"]
    assert any((np.asarray(moved[name]) != start[name]).any() for name in start)


def test_runs_draw_batches_and_noise_of_their_own(searched, monkeypatch, watched):
    fix_numbers(monkeypatch, [2, 2, 2])
    tune(searched(search={"values": {"prox_weight": [1.0]}}), "mr_mtl", progress=False)
    for place in range(3):
        first, second = (one["state"] for one in watched if one["place"] == place)
        assert any(not np.array_equal(one, other) for one, other in zip(first, second, strict=True))


def test_runs_are_scored_on_validation_examples_with_noise_of_their_own(searched, monkeypatch, watched):
    fix_numbers(monkeypatch, [3, 3, 3])
    sizes = []
    monkeypatch.setattr(
        searching,
        "example_scores",
        lambda model, weights, x, y, bound: sizes.append((len(x), len(y))) or np.zeros(len(y)),
    )
    tuned = tune(searched(), "mr_mtl", progress=False)
    clients = tuned.method.clients
    held_out = [clients.num_examples(client_id, "validation") for client_id in clients.client_ids]
    assert sizes == [(size, size) for size in held_out] * 3
    noise = {one["score"] for one in watched}
    assert len(noise) == 9
    # Nine draws of a Gaussian of standard deviation 10: far outside of this with probability below 1e-4.
    assert 3 < np.std(list(noise)) < 25


def stop_at_run(monkeypatch, number):
    real = searching.repeat

    def failing(*arguments):
        if arguments[5] == number:
            raise RuntimeError("the power went out")
        return real(*arguments)

    monkeypatch.setattr(tuning, "repeat", failing)


@pytest.mark.parametrize("stopped_at", [1, 3])
def test_a_search_that_was_stopped_resumes_to_the_same_bits(searched, monkeypatch, stopped_at):
    fix_numbers(monkeypatch, [1, 4, 2])
    whole = tune(searched("whole"), "mr_mtl", progress=False)
    config = searched("stopped")
    with monkeypatch.context() as patch:
        stop_at_run(patch, stopped_at)
        with pytest.raises(RuntimeError):
            tune(config, "mr_mtl", progress=False)
    folder = config.algorithm_folder("mr_mtl")
    assert stat.S_IMODE((folder / "search").stat().st_mode) == 0o700
    # On record at its full price from the start.
    (release,) = all_releases(folder.parent)
    assert release.ledger.to_json() == whole.state.ledger.to_json()
    with pytest.raises(ConfigError, match="--resume or --overwrite"):
        tune(config, "mr_mtl", progress=False)
    with pytest.raises(ConfigError, match="other settings"):
        tune(searched("stopped", {"mean_runs": 4.0}), "mr_mtl", resume=True, progress=False)
    with pytest.raises(ConfigError, match="clients_per_call"):
        tune(searched("stopped", training__clients_per_call=7), "mr_mtl", resume=True, progress=False)
    with pytest.raises(ConfigError, match="unfinished `tff-pdp tune`"):
        train(searched("stopped", tuning__search=None), "mr_mtl", progress=False)
    with pytest.raises(ConfigError, match="run `tff-pdp tune --resume` first"):
        evaluate_experiment(config, ["mr_mtl"])
    resumed = tune(config, "mr_mtl", resume=True, progress=False)
    assert_same(resumed.state.client_states, whole.state.client_states)
    assert_same(resumed.state.server_state, whole.state.server_state)
    assert resumed.selected == whole.selected
    assert resumed.state.ledger.to_json() == whole.state.ledger.to_json()
    assert not (folder / "search").exists()


def test_a_search_that_is_replaced_stays_on_record_without_how_far_it_came(searched, monkeypatch):
    config = searched(training__test_only_seed=None)
    folder = config.algorithm_folder("mr_mtl")
    fix_numbers(monkeypatch, [3, 3, 3])
    with monkeypatch.context() as patch:
        stop_at_run(patch, 2)
        with pytest.raises(RuntimeError):
            tune(config, "mr_mtl", progress=False)
    tuned = tune(config, "mr_mtl", overwrite=True, progress=False)
    releases = all_releases(folder.parent)
    assert [release.ledger.to_json() for release in releases] == [tuned.state.ledger.to_json()] * 2
    (entry,) = (folder.parent / "earlier_releases.jsonl").read_text().splitlines()
    assert json.loads(entry)["rounds"] == 3, "those that were planned"


def test_a_silo_that_makes_no_run_keeps_the_model_it_has_paid_for(searched, monkeypatch):
    fix_numbers(monkeypatch, [0, 1, 0])
    tuned = tune(searched(search={"runs": "poisson"}), "mr_mtl", progress=False)
    assert tuned.selected["silo_00"] == {
        "hparams": {"prox_weight": 1.0, "learning_rate": 0.3},
        "noisy_score": None,
    }
    method = tuned.method
    with experiment_engine(searched()):
        first, data = first_state(method, 1), method.client_data("train")
        pivot = searching.run_pivot(method, tuned.search, first, data, range(1, 4))
    for place in (0, 2):
        assert_same(tuned.state.client_states[place], pivot.client_states[place])


def test_a_method_that_releases_nothing_trains_no_pivot_run(searched, monkeypatch, watched):
    fix_numbers(monkeypatch, [0, 2, 1])
    search = {"algorithm": "local_only", "values": {"learning_rate": [0.05, 0.3]}, "runs": "poisson"}
    config = searched(search=search)
    monkeypatch.setattr(searching, "run_round", lambda *arguments: pytest.fail("a pivot run was trained"))
    tuned = tune(config, "local_only", progress=False)
    assert len(watched) == 3
    with experiment_engine(config):
        first = first_state(tuned.method, 1)
    assert_same(tuned.state.server_state, first.server_state)
    assert_same(tuned.state.client_states[0], first.client_states[0])
    reasons = {(entry.scope, entry.reason, entry.count) for entry in tuned.state.ledger.entries}
    expected = ("private hyper-parameter search", DRAWN_NOISE)
    assert reasons == {(client_id, reason, 1) for client_id in tuned.state.client_ids for reason in expected}


def test_a_fixed_grid_makes_and_charges_every_run(searched, watched):
    config = searched(search={"runs": "fixed"})
    tuned = tune(config, "mr_mtl", progress=False)
    assert len(watched) == 4 * 3
    # The seed is known, so that nothing is claimed; what follows is of the mechanism.
    assert (tuned.claim, tuned.costs) == ("none", {})
    said = tuning.tune_summary(config, tuned)
    assert (said["claim"], said["epsilon"]) == ("none", {})
    assert tuning.tune_text(said).endswith(
        "claim: none, and no epsilon: test mode: all noise follows from a fixed seed, so anyone can subtract it"
    )
    found = search_costs(tuned.method.plan, tuned.search, tuned.state.ledger)
    for client_id, costs in found.items():
        # To the bit: equal events are counted together before anything is computed.
        assert costs.total == costs.fixed_grid
        steps = dp_event.SelfComposedDpEvent(step_event(tuned.method, client_id), 5 * 3)
        released = [steps, dp_event.SelfComposedDpEvent(SCORE, 4), tuned.method.plan.drawn_noise[client_id]]
        by_hand = epsilon_bounds(dp_event.ComposedDpEvent(released), 1e-4).best
        assert costs.total == by_hand
    summary = evaluate_experiment(config, ["mr_mtl"])
    assert summary["privacy"]["claim"] == "none"  # A fixed seed.
    assert "tried each of 4 candidates once" in (config.algorithm_folder("mr_mtl").parent / "report.html").read_text()


def test_numbers_of_runs_follow_from_the_key_alone(searched):
    method = build_method(searched(), "mr_mtl")
    search = method.plan.search
    numbers = [searching.numbers_of_runs(method, search, RunKey.from_test_seed(seed)) for seed in range(300)]
    assert numbers[:5] == [searching.numbers_of_runs(method, search, RunKey.from_test_seed(seed)) for seed in range(5)]
    flat = np.ravel(numbers)
    assert flat.min() == 1
    # A geometric number with mean 3 has variance 6.
    assert abs(flat.mean() - 3.0) < standard_errors() * math.sqrt(6 / flat.size)
    assert (np.ptp(numbers, axis=1) > 0).mean() > 0.5, "silos draw for themselves"
    tried = [
        [searching.candidate_of(search, RunKey.from_test_seed(seed), client_id, run)["prox_weight"] for run in (1, 2)]
        for seed in range(100)
        for client_id in method.clients.client_ids
    ]
    by_silo = np.reshape(tried, [100, 3, 2])
    for axis in (1, 2):  # Over silos and over runs alike.
        assert (np.ptp(by_silo, axis=axis) > 0).mean() > 0.3


def test_one_example_changes_a_score_by_no_more_than_the_noise_is_for():
    generator = np.random.default_rng(0)
    classifier, regression, bound = build_linear([4], 3), build_linear_regression([4], 0), 0.25
    extremes = 0
    noise = 8.0
    for model, most in ((classifier, 1.0), (regression, bound)):
        for scale in (0.1, 1.0, 1e20, math.nan):
            weights = {
                name: generator.normal(size=a.shape).astype(np.float32) * np.float32(scale)
                for name, a in model.init(0).items()
            }
            x = generator.normal(size=[9, 4]).astype(np.float32)
            x[8] = 1e30
            y = (generator.integers(3, size=9) if model.num_classes else generator.normal(size=9)).astype(
                model.label_dtype
            )
            whole = searching.example_scores(model, weights, x, y, most)
            assert whole.shape == (9,) and np.isfinite(whole).all()
            # As they are added up: whole steps of a grid, so that there is nothing to be rounded.
            stddev = noise * most
            steps, step = whole_steps(whole, stddev), Fraction(stddev) / 2**GRID_BITS
            for left_out in range(9):
                kept = np.arange(9) != left_out
                own = searching.example_scores(model, weights, x[kept], y[kept], most)
                change = abs(int(steps - whole_steps(own, stddev))) * step
                assert change <= most
                extremes += change > most * (1 - 2.0**-20)
    assert extremes > 5, "the bound was never reached"
    nothing = searching.example_scores(regression, regression.init(0), np.zeros([0, 4], np.float32), np.zeros(0), bound)
    assert whole_steps(nothing, noise) == 0


def test_scores_count_correct_answers_or_subtract_clipped_errors():
    x, y = np.array([[1.0], [2.0], [3.0]], np.float32), np.array([1.5, 2.0, 9.0], np.float32)
    model = build_linear_regression([1], 0)
    identity = {name: np.ones_like(a) if a.ndim > 1 else np.zeros_like(a) for name, a in model.init(0).items()}
    assert searching.example_scores(model, identity, x, y, 1.0).tolist() == [-0.25, 0.0, -1.0]
    model = build_linear([1], 2)
    larger_is_one = {
        name: np.array([[0.0, 1.0]], np.float32) if a.ndim > 1 else np.array([1.5, 0.0], np.float32)
        for name, a in model.init(0).items()
    }
    assert searching.example_scores(model, larger_is_one, x, np.array([0, 1, 0]), 1.0).tolist() == [1.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("algorithm", "settings", "search", "message"),
    [
        (
            "fed_avg",
            {},
            {"values": {"learning_rate": [0.1]}},
            "personal model of fed_avg, with these settings, is a shared",
        ),
        ("ifca", {}, {"values": {"learning_rate": [0.1]}}, "personal model of ifca"),
        ("ifca_fed_avg", {}, {"values": {"learning_rate": [0.1]}}, "personal model of ifca_fed_avg"),
        ("finetune", {"federated_fraction": 1.0}, {"values": {"learning_rate": [0.1]}}, "personal model of finetune"),
        ("mr_mtl", {}, {"values": {"local_steps": [1, 2]}}, "^tuning.search.values.local_steps cannot be searched"),
        ("mocha", {}, {"values": {"client_index": [1]}}, "mocha can be searched for: learning_rate, prox_weight"),
        ("mr_mtl", {}, {"values": {"momentum": [0.9]}}, "^tuning.search.values.momentum cannot be searched"),
        ("mr_mtl", {"prox_weight": "auto"}, {"values": {"prox_weight": [0.9]}}, "prox_weight is 'auto'"),
        ("mr_mtl", {}, {"values": {"prox_weight": ["auto"]}}, "prox_weight.0. must be a number, not 'auto'"),
        ("mr_mtl", {}, {"values": {"prox_weight": 0.1}}, "must be a list of at least 1, each a number, not 0.1"),
        ("mr_mtl", {}, {"values": {"prox_weight": []}}, "prox_weight must be a list of at least 1, .* not \\[\\]"),
        ("mr_mtl", {}, {"values": {"prox_weight": [True]}}, "prox_weight.0. must be a number, not True"),
        ("mr_mtl", {}, {"values": {"prox_weight": [-1.0]}}, "must be a number of at least 0, or auto, not -1.0"),
        ("mr_mtl", {}, {"values": {"prox_weight": [1, 1.0]}}, "lists a value twice"),
        ("mr_mtl", {}, {"values": {}}, "tuning.search.values must be a mapping from names, at least 1, .* not {}"),
        ("mr_mtl", {}, {"score_noise_multiplier": 0.0}, "score_noise_multiplier must be a number above 0, not 0.0"),
        ("mr_mtl", {}, {"score_bound": math.inf}, "score_bound must be a number above 0, not inf"),
        ("mr_mtl", {}, {"runs": "often"}, "tuning.search.runs must be .*, not 'often'"),
        ("mr_mtl", {}, {"mean_runs": 1.0}, "mean_runs must be a number above 1, not 1.0"),
    ],
)
def test_searches_that_cannot_be_made_are_refused_by_name(searched, algorithm, settings, search, message):
    search = {**search, "algorithm": algorithm}
    with pytest.raises(ConfigError, match=message):
        build_method(searched(search=search, algorithms={algorithm: settings}, export__algorithm=algorithm), algorithm)


@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [
        pytest.param("ditto", {}, marks=pytest.mark.all),
        pytest.param("mocha", {}, marks=pytest.mark.all),
        pytest.param("finetune", {}, marks=pytest.mark.all),
        pytest.param("ifca_local", {}, marks=pytest.mark.all),
        pytest.param("ifca_finetune", {}, marks=pytest.mark.all),
        ("ifca_mr_mtl", {}),
    ],
)
def test_methods_in_which_silos_keep_a_model_can_be_searched(searched, monkeypatch, watched, algorithm, settings):
    config = searched(
        search={"algorithm": algorithm, "values": {"learning_rate": [0.05, 0.3]}, "mean_runs": 1.5},
        algorithms={algorithm: settings},
        export__algorithm=algorithm,
        training__rounds=2,
        privacy__budgets={"kind": "one_for_all", "epsilon": 8.0, "delta": 1e-4},
    )
    fix_numbers(monkeypatch, [1, 2, 1])
    tuned = tune(config, algorithm, progress=False)
    assert len(watched) == 4
    assert all(tuned.state.ledger.epsilon(client_id).best <= 8.0 for client_id in tuned.state.client_ids)


def test_silos_without_validation_examples_are_named_unless_their_sizes_are_secret(searched, monkeypatch):
    from tff_pdp.data.client_dataset import ClientDataset

    real = ClientDataset.num_examples

    def none_in_one(self, client_id, split):
        return 0 if (client_id, split) == ("silo_01", "validation") else real(self, client_id, split)

    monkeypatch.setattr(ClientDataset, "num_examples", none_in_one)
    with pytest.raises(ConfigError, match="1 of 3 silos have none, for example 'silo_01'"):
        build_method(searched(), "mr_mtl")
    secret = {"kind": "noised", "epsilon": 0.5}
    assert build_method(searched("secret", privacy__num_examples=secret), "mr_mtl").plan.num_examples_are_noised
    with pytest.raises(ConfigError, match="silos have none"):
        build_method(searched("none", privacy__num_examples=secret, data__validation_fraction=0.0), "mr_mtl")


def test_a_method_with_a_search_is_not_trained_without_it(searched):
    with pytest.raises(ConfigError, match="run `tff-pdp tune`"):
        train(searched(), "mr_mtl", progress=False)
    with pytest.raises(ConfigError, match="there is nothing to search"):
        tune(searched(), "local_only", progress=False)
    with pytest.raises(ConfigError, match=r"tuning.search.algorithm 'momentum' must be one of"):
        searched(search={"algorithm": "momentum"})


def test_a_search_changes_the_hash_of_its_method_alone(searched):
    config, other = searched(), searched(search={"mean_runs": 4.0})
    without = searched(tuning__search=None)
    assert len({one.hash("mr_mtl", "") for one in (config, other, without)}) == 3
    assert len({one.hash("fed_avg", "") for one in (config, other, without)}) == 1


def test_the_command_searches_what_its_options_say(experiment, tmp_path, capsys):
    content = experiment(training__rounds=2, training__test_only_seed=None, privacy__batch_size=9999).to_dict()
    assert content["tuning"]["search"] is None
    path = tmp_path / "experiment.yaml"
    path.write_text(json.dumps(content))
    command = ["tune", "--config", str(path), "--json", "--algorithm", "mr_mtl", "--values", "prox_weight=0.1,1,10"]
    assert main([*command, "--values", "learning_rate=0.3", "--runs", "0.5", "--mean-runs", "2"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["algorithm"], summary["candidates"]) == ("mr_mtl", 3)
    assert summary["searched"] == ["prox_weight", "learning_rate"]
    for silo in summary["selected"].values():
        assert silo["hparams"]["prox_weight"] in (0.1, 1.0, 10.0) and silo["hparams"]["learning_rate"] == 0.3
        assert math.isfinite(silo["noisy_score"])
    epsilon = summary["epsilon"]
    assert 0 < epsilon["untuned"]["minimum"] < epsilon["total"]["minimum"] <= 2.0
    assert epsilon["total"]["maximum"] <= 6.0 and epsilon["fixed_grid"]["maximum"] > epsilon["untuned"]["maximum"]
    search = {"algorithm": "mr_mtl", "values": {"prox_weight": [0.1, 1, 10], "learning_rate": [0.3]}, "runs": 0.5}
    content["tuning"]["search"] = {**search, "mean_runs": 2.0}
    path.write_text(json.dumps(content))
    assert main(["evaluate", "--config", str(path), "--algorithm", "mr_mtl"]) == 0
    assert main(["train", "--config", str(path), "--algorithm", "mr_mtl"]) == 2
    assert "tff-pdp tune" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "nothing to search"),
        (["--algorithm", "mr_mtl"], "missing key tuning.search.values: a mapping"),
        (["--algorithm", "mr_mtl", "--values", "prox_weight"], "NAME=NUMBER"),
        (["--algorithm", "mr_mtl", "--values", "prox_weight=[1"], "--values: not valid YAML"),
    ],
)
def test_options_that_describe_no_search(experiment, tmp_path, capsys, options, message):
    path = tmp_path / "experiment.yaml"
    path.write_text(json.dumps(experiment().to_dict()))
    assert main(["tune", "--config", str(path), *options]) == 2
    assert message in capsys.readouterr().err


def test_training_all_methods_leaves_out_the_one_that_is_searched(searched, tmp_path, monkeypatch, capsys):
    path = tmp_path / "experiment.yaml"
    path.write_text(json.dumps(searched().to_dict()))
    trained = []

    def fake(config, name, **options):
        trained.append(name)
        return dataclasses.make_dataclass("State", ["round_number"])(3)

    monkeypatch.setattr("tff_pdp.training.train.train", fake)
    assert main(["train", "--config", str(path)]) == 0
    assert trained == ["local_only", "fed_avg"]
