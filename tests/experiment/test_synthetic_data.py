"""Synthetic data are released once, charged to every method, and trained on for nothing before the records are."""

import math
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from tff_pdp.data.client_dataset import ClientDataset, ClientExamples
from tff_pdp.errors import BudgetError, ConfigError, DataError
from tff_pdp.experiment.before_training import RELEASES_FILE, STATISTICS
from tff_pdp.experiment.build import build_method
from tff_pdp.experiment.synthetic_data import DATA_FILE, KEY_FILE, ReleaseKey
from tff_pdp.personal_models.export import check_may_leave
from tff_pdp.privacy.accounting.accountants import epsilon_bounds
from tff_pdp.privacy.plans.silo_example import GRADIENTS
from tff_pdp.privacy.synthetic.silo_data import SYNTHETIC
from tff_pdp.registry.entries import Registry
from tff_pdp.training.train import train

GENERATOR = {"kind": "dp_gaussian", "examples": 40}
SECTION = {"generator": GENERATOR, "rounds": 3}
ALGORITHMS = {"fed_avg": {"local_steps": 4, "adaptation_steps": 2}, "mr_mtl": {"adaptation_steps": 2}}


@pytest.fixture
def synthetic(experiment):
    """A function that builds a small experiment with synthetic data; arguments replace settings."""

    def build(name="run", section=SECTION, **overrides):
        settings = {"algorithms": ALGORITHMS, "export__algorithm": "fed_avg", **overrides}
        return experiment(name, privacy__synthetic=section, **settings)

    return build


def test_data_are_released_once_for_all_methods_and_charged_to_each(synthetic):
    config = synthetic(training__test_only_seed=None)
    methods = [build_method(config, name) for name in ("fed_avg", "mr_mtl", "fed_avg")]
    files = [method.first_phase.source.sha256 for method in methods]
    assert len(set(files)) == 1
    folder = config.clients_folder.parent
    assert not (folder / KEY_FILE).exists()
    for method in methods:
        entries = [one for one in method.plan.build_ledger().entries if one.reason == SYNTHETIC]
        assert [one.scope for one in entries] == list(method.clients.client_ids)
        assert {one.count for one in entries} == {1}
        for client_id in method.clients.client_ids:
            source = method.first_phase.source
            assert source.num_examples(client_id) == 40, "a public constant, whatever the silo's size"
            assert source.load(client_id).x.dtype == np.float32


def test_generator_and_adaptation_stay_within_the_budget_and_use_it(synthetic):
    method = build_method(synthetic(), "fed_avg")
    plan = method.plan
    for client_id, budget in plan.budgets.items():
        (event,) = (event for event, reason in plan.fixed_events[client_id] if reason == SYNTHETIC)
        alone = epsilon_bounds(event, budget.delta / 2).best
        assert 0.999 * budget.epsilon / 2 <= alone <= budget.epsilon / 2
        assert sum(plan.training_counts(client_id).values()) == 3 * 2, "three rounds of two gradients"
        everything = epsilon_bounds(_composed(plan, client_id), budget.delta).best
        assert 0.99 * budget.epsilon <= everything <= budget.epsilon


def _composed(plan, client_id):
    import dp_accounting

    counts = plan.all_counts(client_id)
    return dp_accounting.ComposedDpEvent(
        [dp_accounting.SelfComposedDpEvent(event, count) for event, count in counts.items()]
    )


def test_rounds_on_synthetic_data_cost_nothing(synthetic):
    config = synthetic()
    state, method = train(config, "fed_avg", progress=False), build_method(config, "fed_avg")
    for client_id in method.clients.client_ids:
        charged = [number for number in range(1, 7) if method.plan.charges(client_id, number)]
        assert charged == [4, 5, 6]
        own = [entry for entry in state.ledger.entries if entry.scope == client_id]
        assert sum(entry.count for entry in own if entry.reason == GRADIENTS) == 6
        assert sum(entry.count for entry in own if entry.reason == SYNTHETIC) == 1


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_a_run_that_stops_anywhere_goes_on_with_the_same_bits_and_the_same_release(synthetic, name):
    expected = train(synthetic("whole"), name, progress=False)
    for stops_after in range(1, 6):
        config = synthetic(f"stopped_{stops_after}", training__checkpoint_every=1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("tff_pdp.training.train.run_round", _stopping(stops_after))
            with pytest.raises(KeyboardInterrupt):
                train(config, name, progress=False)
        released = (config.clients_folder.parent / RELEASES_FILE).read_bytes()
        found = train(config, name, resume=True, progress=False)
        assert (config.clients_folder.parent / RELEASES_FILE).read_bytes() == released
        _assert_equal(found.server_state, expected.server_state)
        _assert_equal(found.client_states, expected.client_states)


def _stopping(rounds):
    from tff_pdp.training.rounds import run_round

    def run(method, state, round_number, data):
        if round_number > rounds:
            raise KeyboardInterrupt
        return run_round(method, state, round_number, data)

    return run


def _assert_equal(found, expected):
    pairs = zip(tf.nest.flatten(found), tf.nest.flatten(expected), strict=True)
    for one, other in pairs:
        np.testing.assert_array_equal(one, other)


def test_records_have_no_effect_on_the_shared_model_after_the_release(synthetic):
    """With all records replaced after the release, the shared model has the same bits, and personal models others."""
    config = synthetic()
    first = train(config, "fed_avg", progress=False)
    load_many = ClientDataset.load_many

    def replaced(self, places, split):
        own = load_many(self, places, split)
        return ClientExamples(np.random.default_rng(0).random(own.x.shape, np.float32), own.y[::-1].copy())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ClientDataset, "load_many", replaced)
        second = train(config, "fed_avg", overwrite=True, progress=False)
    _assert_equal(second.server_state, first.server_state)
    for one, other in zip(first.client_states, second.client_states, strict=True):
        assert any(not np.array_equal(value, other["weights"][name]) for name, value in one["weights"].items())


def test_a_release_that_was_stopped_is_repeated_with_the_same_bits_and_entered_once(synthetic):
    config = synthetic(training__test_only_seed=None)
    folder = config.clients_folder.parent
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tff_pdp.experiment.before_training.write_json", _fail)
        with pytest.raises(KeyboardInterrupt):
            build_method(config, "fed_avg")
    assert (folder / KEY_FILE).stat().st_mode & 0o777 == 0o600
    with np.load(folder / DATA_FILE) as stored:
        before = {name: stored[name] for name in stored}
    method = build_method(config, "fed_avg")
    with np.load(folder / DATA_FILE) as stored:
        for name, value in before.items():
            np.testing.assert_array_equal(stored[name], value)
    assert not (folder / KEY_FILE).exists()
    registry = Registry(config.privacy.registry)
    names = [entry.method for entry in registry.entries() if Path(entry.folder) == folder.absolute()]
    assert names == [STATISTICS]
    del method


def _fail(*_):
    raise KeyboardInterrupt


def test_a_key_is_used_for_one_set_of_settings_alone(tmp_path):
    """The same noise on two releases would cancel."""
    first = ReleaseKey.keep(tmp_path, {"share": 1}, None, lambda _: False)
    assert ReleaseKey.keep(tmp_path, {"share": 1}, None, lambda _: True) == first
    with pytest.raises(ConfigError, match="its cost counts"):
        ReleaseKey.keep(tmp_path, {"share": 2}, None, lambda release_id: release_id == first.release_id)
    other = ReleaseKey.keep(tmp_path, {"share": 2}, None, lambda _: False)
    assert other.secret != first.secret and other.release_id != first.release_id


@pytest.mark.parametrize(
    "changed",
    [
        {"section": {**SECTION, "share": 0.25}},
        {"section": {**SECTION, "generator": {**GENERATOR, "examples": 41}}},
        {"privacy__budgets": {"kind": "one_for_all", "epsilon": 3.0, "delta": 1e-5}},
        {"section": {**SECTION, "adaptation": "non_private"}},
    ],
)
def test_another_share_generator_or_budget_does_not_release_again_in_silence(synthetic, changed):
    build_method(synthetic(), "fed_avg")
    with pytest.raises(ConfigError, match="name another output folder"):
        build_method(synthetic(**changed), "fed_avg")


def test_more_rounds_on_the_same_data_need_no_other_release(synthetic):
    first = build_method(synthetic(), "fed_avg").first_phase.source.sha256
    method = build_method(synthetic(section={**SECTION, "rounds": 5}), "fed_avg")
    assert method.first_phase.source.sha256 == first
    assert (method.first_rounds, method.plan.free_rounds) == (5, 5)


def test_damaged_or_lost_data_are_not_made_again(synthetic):
    config = synthetic()
    build_method(config, "fed_avg")
    path = config.clients_folder.parent / DATA_FILE
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(DataError, match="damaged"):
        build_method(config, "fed_avg")
    path.unlink()
    with pytest.raises(DataError, match="another release costs again"):
        build_method(config, "fed_avg")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"section": {**SECTION, "rounds": 6}}, "below training.rounds"),
        ({"section": {**SECTION, "generator": {**GENERATOR, "num_classes": 4}}}, "leave the setting out"),
        ({"algorithms": {"ifca": {}}, "export__algorithm": "ifca"}, "reads clients' records in a way of its own"),
        ({"algorithms": {"fed_avg": {"adaptation_step": 2}}}, "did you mean adaptation_steps"),
        ({"privacy__budgets": {"kind": "one_for_all", "epsilon": math.inf, "delta": 1e-5}}, "needs finite budgets"),
    ],
)
def test_settings_that_do_not_suit_are_refused_before_anything_is_released(synthetic, changed, message):
    config = synthetic(**changed)
    with pytest.raises(ConfigError, match=message):
        build_method(config, next(iter(config.algorithms)))
    assert not (config.clients_folder.parent / DATA_FILE).exists()


def test_asymptotic_noise_is_for_training_without_synthetic_data(synthetic):
    with pytest.raises(ConfigError, match="use tightest"):
        synthetic(privacy__noise_calibration="paper_asymptotic")


def test_other_plans_have_no_synthetic_data(experiment):
    with pytest.raises(ConfigError, match=r"privacy\.synthetic"):
        experiment(privacy__kind="none", privacy__synthetic=SECTION)


def test_adaptation_without_noise_claims_nothing_of_personal_models(synthetic):
    config = synthetic(section={**SECTION, "adaptation": "non_private"})
    state, method = train(config, "fed_avg", progress=False), build_method(config, "fed_avg")
    assert method.plan.claim == "none" and "without clip and noise" in method.plan.claim_reason
    for client_id, budget in method.plan.budgets.items():
        assert state.ledger.epsilon(client_id).best <= budget.epsilon
        assert state.ledger.epsilon(client_id).best >= 0.99 * budget.epsilon, "synthetic data have the whole budget"
        assert {entry.reason for entry in state.ledger.entries} == {SYNTHETIC}
    with pytest.raises(ConfigError, match="cannot be exported"):
        check_may_leave(config)


def test_budgets_that_pay_for_no_generator_are_refused(synthetic):
    config = synthetic(privacy__budgets={"kind": "one_for_all", "epsilon": 1e-7, "delta": 1e-12})
    with pytest.raises(BudgetError, match=r"privacy\.synthetic"):
        build_method(config, "fed_avg")
