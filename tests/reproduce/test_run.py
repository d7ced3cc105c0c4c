"""Real runs, of three made-up schools."""

import contextlib
import math

import numpy as np
import pytest

from tests.privacy.accounting.anchor_support import by_transforms
from tests.reproduce.reproduce_support import build_reproduction, write_school
from tests.reproduce.settings_support import setting_changed
from tests.rounding import ELEMENTARY, probable_gamma
from tff_pdp.data.client_dataset import ClientDataset
from tff_pdp.experiment.build import build_method
from tff_pdp.privacy.accounting.budgets import OneForAll
from tff_pdp.privacy.plans.plan import PlannedTraining
from tff_pdp.privacy.plans.silo_example import SiloExample
from tff_pdp.reproduce.inputs import digest_of
from tff_pdp.reproduce.jobs import Job
from tff_pdp.reproduce.run import JobRunner

# Local steps of a run, and roundings of one: sums over 28 features and up to 32 examples, and six operations more.
STEPS, STEP = 40, 28 + 32 + 6


@pytest.fixture(scope="module")
def reproduction(tmp_path_factory):
    """At the small scale: 40 rounds."""
    folder = tmp_path_factory.mktemp("reproduce")
    path = write_school(folder / "school.mat")
    variants = ("paper", "paper_common_scaling", "default")
    with setting_changed("school"):
        yield build_reproduction(
            folder, scale_name="small", variant_names=variants, data_input=path, data_digest=digest_of(path)
        )


@pytest.fixture(scope="module")
def runner(reproduction):
    """One for all tests, as it keeps what it has compiled."""
    runner = JobRunner(reproduction)
    yield runner
    runner.close()


def test_a_run_is_a_function_of_its_job(reproduction, runner):
    job = Job("paper", "mr_mtl", 6.0, 0)
    first = runner(job).row
    assert list(first)[:5] == ["method", "epsilon", "seed", "metric", "value"]
    assert (first["method"], first["epsilon"], first["seed"], first["metric"]) == ("mr_mtl", 6.0, 0, "mse")
    assert (first["learning_rate"], first["prox_weight"]) == (0.01, 1.0)
    assert runner(Job("paper", "mr_mtl", 6.0, 1)).row["value"] != first["value"]
    assert runner(job).row == first
    with contextlib.closing(JobRunner(reproduction)) as other:
        assert other(job).row == first


def test_without_noise_the_value_is_that_of_gradient_descent_by_hand(reproduction, runner):
    """No silo has more training examples than a batch, so every step takes all of them."""
    job = Job("paper", "local_only", float("inf"), 0)
    row = runner(job).row
    assert (row["epsilon"], row["epsilon_spent"]) == ("inf", None)
    clients = ClientDataset.open(reproduction.config(job).clients_folder)
    squares, silos = [], []
    for client_id in clients.client_ids:
        train, test = clients.load(client_id, "train"), clients.load(client_id, "test")
        mean, stddev = train.x.mean(0, dtype=np.float64), train.x.std(0, dtype=np.float64)
        stddev[stddev == 0] = 1
        x, weights, bias = (train.x - mean) / stddev, np.zeros(28), 0.0
        for _ in range(STEPS):
            residuals = x @ weights + bias - train.y
            weights, bias = weights - 0.01 * residuals @ x / len(x), bias - 0.01 * residuals.mean()
        squares.extend(((test.x - mean) / stddev @ weights + bias - test.y) ** 2)
        silos.append(np.mean(squares[-len(test.y) :]))
    assert len(squares) == 8 + 5 + 6
    # Residuals lose what forty steps round of labels up to one and of themselves; squares lose that twice.
    largest = math.sqrt(max(squares))
    bound = 2 * largest * probable_gamma(STEPS * STEP) * (1 + largest)
    assert row["value"] == pytest.approx(np.mean(squares), abs=bound)
    assert row["mean_over_clients"] == pytest.approx(np.mean(silos), abs=bound)
    # The tenth of three is one.
    assert row["worst_decile"] == pytest.approx(max(silos), abs=bound)


def test_noise_costs_accuracy_and_less_epsilon_than_the_paper_says(runner):
    private, free = (runner(Job("paper", "local_only", epsilon, 0)).row for epsilon in (6.0, float("inf")))
    assert private["value"] > free["value"]
    assert (private["claim"], private["epsilon_spent"]) == ("none", None)
    # Batches are not those of the accounting, whatever the key.
    assert (private["with_secret_key"]["claim"], private["with_secret_key"]["epsilon"]) == ("none", None)
    config = runner._reproduction.config(Job("paper", "local_only", 6.0, 0))
    assert 4 < build_method(config, "local_only").plan.planned_epsilon() < 6


def test_the_planned_epsilon_is_what_the_ledger_says_after_every_round():
    budgets = OneForAll(epsilon=4.0, delta=1e-3)
    privacy = SiloExample(kind="silo_example", batch_size=8, budgets=budgets, noise_calibration="paper_rdp")
    plan = privacy.build(
        PlannedTraining({"a": 20, "b": 40}, gradients_per_round={"a": 2, "b": 5}, rounds=3, selection_rounds=2)
    )
    ledger = plan.build_ledger()
    for round_number in (1, 2, 3):
        plan.charge_round(ledger, round_number)
    spent = max(ledger.epsilon(name).best for name in "ab")
    assert plan.planned_epsilon() == pytest.approx(spent, rel=by_transforms(20, 1e-3))


def test_runs_of_one_method_share_their_computations(runner):
    runner(Job("paper", "mr_mtl", 6.0, 0))
    compiled = dict(runner.computations)
    runner(Job("paper", "mr_mtl", 3.0, 1, prox_weight=0.1))
    assert runner.computations == compiled
    # Nothing before has run this method.
    runner(Job("paper", "fed_avg", 6.0, 0))
    assert len(runner.computations) == len(compiled) + 1


def test_lambda_zero_is_local_training(runner):
    """Two methods, two computations, the same batches and noise: an identity over the whole pipeline."""
    alone = runner(Job("paper", "local_only", 6.0, 0)).row
    free = runner(Job("paper", "mr_mtl", 6.0, 0, prox_weight=0.0)).row
    # As in the steps by hand, in both, with noise: errors of a residual, twice in its square.
    assert free["value"] == pytest.approx(alone["value"], rel=2 * 2 * probable_gamma(STEPS * (STEP + 3 * ELEMENTARY)))


def test_the_automatic_lambda_is_another_than_the_configurations(runner):
    fixed, automatic = (runner(Job("default", name, 6.0, 0)).row for name in ("mr_mtl", "mr_mtl_auto"))
    assert (fixed["prox_weight"], automatic["prox_weight"]) == (1.0, "auto")
    assert automatic["value"] != pytest.approx(fixed["value"], rel=1e-4)


def test_a_budget_that_selection_alone_overspends_is_an_outcome(runner):
    outcome = runner(Job("paper", "ifca", 0.01, 0))
    # Forty selections at 3 % of epsilon each need more than all of it only for a small epsilon or many rounds.
    assert outcome.row is None
    assert "epsilon=0.01" in outcome.infeasible


def test_a_training_that_diverges_is_an_error(reproduction, runner):
    job = Job("paper", "mr_mtl", float("inf"), 0, prox_weight=1e6)
    with pytest.raises(FloatingPointError, match="diverged"):
        runner(job)


def test_the_variants_scale_and_draw_differently(runner):
    own, common = (runner(Job(name, "fed_avg", 6.0, 0)).row["value"] for name in ("paper", "paper_common_scaling"))
    assert own != common


def test_a_setting_may_weigh_clients_equally_and_show_the_shared_model(runner):
    jobs = [Job("default", name, 6.0, 0) for name in ("fed_avg", "local_only")]
    before = [runner(job).row for job in jobs]
    with setting_changed("school", averages="clients", shows_shared_model=True):
        shared, alone = (runner(job).row for job in jobs)
    assert "shared" not in before[0] and "shared" not in alone
    # A client's model is the shared one.
    assert shared["shared"] == shared["value"] == shared["mean_over_clients"] == before[0]["mean_over_clients"]
    # Test examples: 8, 5 and 6.
    assert before[0]["value"] != before[0]["mean_over_clients"]
    assert alone["value"] == before[1]["mean_over_clients"]
