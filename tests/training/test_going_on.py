"""A run goes on after its last round: what was spent stays charged, and the rest of a budget bounds what is added."""

import dataclasses
import math

import numpy as np
import pytest

from tests.training.stopping import stop_before
from tests.training.test_train import assert_same_run, leaves
from tff_pdp.errors import BudgetError, ConfigError
from tff_pdp.experiment.run_key import RunKey
from tff_pdp.privacy.accounting.grid_distance import GridNoiseDpEvent
from tff_pdp.privacy.plans.extension import noise_multiplier_of
from tff_pdp.privacy.plans.silo_example import SiloExample
from tff_pdp.privacy.plans.unprotected import Unprotected
from tff_pdp.privacy.plans.user import User
from tff_pdp.registry.entries import Registry
from tff_pdp.settings import read_settings
from tff_pdp.training.evaluate import evaluate_experiment, load_trained
from tff_pdp.training.record.charges import CHARGES_FILE, read_charges
from tff_pdp.training.run_folder import read_metrics
from tff_pdp.training.train import train
from tff_pdp.verification.experiment import verify

# Batches of all examples: epsilon follows from a formula, and from nothing but the sum of 1 / z^2.
NAME, WHOLE = "local_only", {"privacy__batch_size": 100_000}


def budgets(epsilon):
    return {"kind": "one_for_all", "epsilon": epsilon, "delta": 1e-3}


def gradients(ledger, scope):
    """Noise multipliers and numbers of a silo's gradients, in the order of their first release."""
    entries = [one for one in ledger.entries if one.scope == scope and not isinstance(one.event, GridNoiseDpEvent)]
    return [(noise_multiplier_of(one.event), one.count) for one in entries]


@pytest.fixture
def build(experiment):
    def build(name="run", rounds=4, epsilon=2.0, **overrides):
        is_private = overrides.get("privacy__kind") != "none"
        own = {**WHOLE, **({"privacy__budgets": budgets(epsilon)} if is_private else {}), **overrides}
        given = {"algorithms": {NAME: {"local_steps": 2}}, "export__algorithm": NAME}
        return experiment(name, training__rounds=rounds, **given, **own)

    return build


def go_on(config, name=NAME):
    return train(config, name, resume=True, progress=False)


def problems(config):
    return [finding for finding in verify(config.algorithm_folder("").resolve()) if finding.status == "problem"]


def test_a_spent_budget_is_said_and_nothing_is_written(build):
    config = build()
    train(config, NAME, progress=False)
    path = config.algorithm_folder(NAME) / CHARGES_FILE
    before = path.read_bytes()
    with pytest.raises(BudgetError) as refusal:
        go_on(build(rounds=8))
    said = str(refusal.value)
    assert "Nothing is left of the budget: in 4 rounds" in said
    assert "of epsilon 2 at delta 0.001" in said
    # As many rounds again cost what one training of 8 rounds with that noise costs.
    assert "4 more rounds need epsilon" in said
    assert path.read_bytes() == before
    assert load_trained(config, NAME)[1].round_number == 4


def test_a_larger_budget_pays_for_more_rounds_and_old_ones_stay_charged(build):
    first = train(build(), NAME, progress=False)
    folder = build().algorithm_folder(NAME)
    state = go_on(build(rounds=7, epsilon=3.0))
    assert (state.round_number, first.round_number) == (7, 4)
    for scope in state.ledger.budgets:
        assert state.ledger.budgets[scope].epsilon == 3.0
        assert 2.99 < state.ledger.epsilon(scope).best <= 3.0
        ((old, count),) = gradients(first.ledger, scope)
        (kept, further) = gradients(state.ledger, scope)
        assert (kept, count, further[1]) == ((old, count), 8, 6)
        # Without sampling, a Gaussian of 1 / sqrt(sum of 1 / z^2) costs as much: the formula has one curve.
        assert math.isclose(further[0], expected_noise(old, 8, 6, 3.0), rel_tol=1e-3)
    assert [row["round"] for row in read_metrics(folder)] == [3, 4, 6, 7]
    assert read_charges(folder).extensions[0].settings["training.rounds"] == 7


def expected_noise(old, count, further, epsilon, delta=1e-3):
    """The noise multiplier of `further` gradients so that a Gaussian's exact curve meets the budget; by bisection."""

    def delta_of(mu):
        def cdf(value):
            return 0.5 * math.erfc(-value / math.sqrt(2))

        return cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * cdf(-mu / 2 - epsilon / mu)

    low, high = 1e-3, 10.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if delta_of(middle) <= delta else (low, middle)
    return math.sqrt(further / (low**2 - count / old**2))


def test_the_statement_tells_both_parts_and_verification_holds(build):
    # With a known seed, nothing is claimed.
    secret = {"training__test_only_seed": None}
    config = build(**secret)
    train(config, NAME, progress=False)
    evaluate_experiment(config)
    assert not problems(config)
    longer = build(rounds=6, epsilon=3.0, **secret)
    go_on(longer)
    assert ["evaluate` again" in finding.text for finding in problems(longer)] == [True]
    summary = evaluate_experiment(longer)
    (extended,) = summary["privacy"]["extended"]
    assert (extended["after_round"], extended["rounds"]) == (4, 6)
    assert extended["noise_before"] != extended["noise_after"]
    assert "taken not to depend on results" in summary["privacy"]["claim_reason"]
    assert "went on after round 4" in (config.algorithm_folder("") / "report.html").read_text()
    assert not problems(longer)
    entries = [entry for entry in Registry(None).entries() if entry.method == NAME]
    assert entries[-1].closed.rounds == 6


def test_an_extension_that_was_stopped_ends_with_the_same_bits(build, monkeypatch):
    for name in ("whole", "stopped"):
        train(build(name), NAME, progress=False)
    whole = go_on(build("whole", rounds=8, epsilon=3.0))
    longer = build("stopped", rounds=8, epsilon=3.0)
    for stop in (5, 8):
        with monkeypatch.context() as patch:
            stop_before(patch, stop)
            with pytest.raises(RuntimeError, match="the power went out"):
                go_on(longer)
        assert not read_charges(longer.algorithm_folder(NAME)).is_closed
    with pytest.raises(ConfigError, match=r"training\.rounds was 8, and is 9 now"):
        go_on(build("stopped", rounds=9, epsilon=3.0))
    with pytest.raises(ConfigError, match=r"privacy\.budgets\.epsilon was 3\.0, and is 2\.0 now"):
        load_trained(build("stopped"), NAME)
    assert_same_run(whole, go_on(longer))
    # An ended run is not trained again.
    assert_same_run(whole, go_on(longer))


def test_a_run_goes_on_twice(build):
    train(build(), NAME, progress=False)
    go_on(build(rounds=6, epsilon=3.0))
    state = go_on(build(rounds=7, epsilon=4.0))
    for scope in state.ledger.budgets:
        assert [count for _, count in gradients(state.ledger, scope)] == [8, 4, 2]
        assert 3.99 < state.ledger.epsilon(scope).best <= 4.0
    assert [one.after_round for one in read_charges(build().algorithm_folder(NAME)).extensions] == [4, 6]


def test_noise_of_all_silos_leaves_a_rest_and_silos_leave_when_it_is_spent(build):
    """With one noise multiplier of all silos, more rounds need no larger budget."""
    common = {"privacy__noise_multiplier": 6.0}
    train(build(epsilon=1.5, **common), NAME, progress=False)
    state = go_on(build(rounds=20, epsilon=1.5, **common))
    scopes = state.ledger.budgets
    for scope in scopes:
        assert 1.3 < state.ledger.epsilon(scope).best <= 1.5
        # All gradients are one kind of release.
        ((noise, count),) = gradients(state.ledger, scope)
        assert noise == 6.0
        assert 8 < count < 40
    with pytest.raises(BudgetError, match="pays for a single further round"):
        go_on(build(rounds=30, epsilon=1.5, **common))


def test_further_noise_is_new_even_for_copies_of_the_run():
    key = RunKey(bytes(range(32)))
    keys = [key, dataclasses.replace(key, attempt=1)]
    keys += [dataclasses.replace(key, attempt=1, salt=salt) for salt in ("00", "01")]
    seeds = {tuple(one.client_seed(5, "a")) for one in keys}
    assert len(seeds) == len({one.server_seeds().tobytes() for one in keys}) == 4


def test_salts_of_copies_differ_outside_of_tests(build):
    salts = set()
    for name in ("one", "other"):
        given = {"training__test_only_seed": None}
        train(build(name, **given), NAME, progress=False)
        state = go_on(build(name, rounds=5, epsilon=3.0, **given))
        salts.add(state.run_key.salt)
    assert len(salts) == 2
    assert all(len(salt) == 32 for salt in salts)


def test_without_privacy_more_rounds_are_just_more_rounds(build):
    plain = {"privacy__kind": "none", "privacy__batch_size": 16}
    train(build(**plain), NAME, progress=False)
    state = go_on(build(rounds=6, **plain))
    assert (state.round_number, state.ledger) == (6, None)
    assert all(np.isfinite(leaf).all() for leaf in leaves(state))


def test_other_settings_stay_and_schedules_do_not_go_on(experiment, build):
    train(build(), NAME, progress=False)
    with pytest.raises(ConfigError, match=r"privacy\.clip_norm was 1\.0, and is 2\.0 now"):
        go_on(build(rounds=6, epsilon=3.0, privacy__clip_norm=2.0))
    with pytest.raises(ConfigError, match=r"training\.rounds was 4, and is 3 now"):
        go_on(build(rounds=3))
    tuned = {**WHOLE, "privacy__budgets": budgets(2.0), "algorithms": {"finetune": {"local_steps": 1}}}
    config = {**tuned, "export__algorithm": "finetune"}
    train(experiment("tuned", training__rounds=2, **config), "finetune", progress=False)
    with pytest.raises(ConfigError, match=r"finetune has a schedule for a planned number of rounds"):
        go_on(experiment("tuned", training__rounds=3, **config), "finetune")


@pytest.mark.parametrize(
    ("privacy", "reason"),
    [
        ({"privacy__kind": "user", "privacy__users_per_round": 2}, "privacy.kind user calibrates its noise once"),
        ({"privacy__noise_calibration": "paper_asymptotic"}, "a formula that knows no earlier rounds"),
        (
            {"privacy__synthetic": {"rounds": 2, "generator": {"kind": "dp_gaussian", "examples": 20, "low": 0}}},
            "privacy.synthetic divides the budget in advance",
        ),
        ({"privacy__kind": "none", "privacy__unit": "user", "privacy__users_per_round": 2}, "privacy.kind none"),
        ({}, ""),
        ({"privacy__noise_calibration": "paper_rdp"}, ""),
        ({"privacy__kind": "none"}, ""),
    ],
)
def test_a_plan_says_why_a_run_cannot_go_on(privacy, reason):
    kinds = {"user": User, "none": Unprotected}
    own = {"batch_size": 4, **{key.removeprefix("privacy__"): value for key, value in privacy.items()}}
    kind = kinds.get(own.setdefault("kind", "silo_example"), SiloExample)
    own |= {"unit": own.get("unit", "silo")} if kind is Unprotected else {"budgets": budgets(2.0)}
    found = read_settings(kind, own, "a test", "privacy").why_it_ends
    assert found.startswith(reason) if reason.startswith("privacy.kind") else reason in found
    assert bool(found) == bool(reason)
