"""What silos release before training is released once, charged to every ledger, and used by everything after it."""

import json

import numpy as np
import pytest

from tests.rounding import assert_within, gamma
from tff_pdp.errors import ConfigError, DataError
from tff_pdp.experiment.before_training import RELEASES_FILE, read_releases
from tff_pdp.experiment.build import build_method
from tff_pdp.privacy.plans.plan import DRAWN_NOISE

# Relative to what is added up, in units of the scale: shift and scale are rounded once each, their sum and product with
# a feature once more.
SCALED = gamma(4)
NOISED = {"kind": "noised", "epsilon": 0.2}
MOMENTS = {"kind": "dp_moments", "lower": 0.0, "upper": 1.0, "noise_multiplier": 20.0}
PAPER = {"kind": "paper_private_standardisation"}


def test_by_default_nothing_is_released(experiment):
    config = experiment()
    method = build_method(config, "mr_mtl")
    assert not (config.clients_folder.parent / RELEASES_FILE).exists()
    assert not method.scalings
    assert method.plan.claim == "formal-conditional"
    assert {entry.reason for entry in method.plan.build_ledger().entries} == {DRAWN_NOISE}


def test_a_noised_number_of_examples_decides_batches_and_noise(experiment):
    config = experiment(privacy__num_examples=NOISED)
    method = build_method(config, "mr_mtl")
    stored = json.loads((config.clients_folder.parent / RELEASES_FILE).read_text())["silos"]
    exact = [method.clients.num_examples(client_id, "train") for client_id in method.clients.client_ids]
    noised = [stored[client_id]["num_examples"] for client_id in method.clients.client_ids]
    assert exact != noised
    for client_id, size in zip(method.clients.client_ids, noised, strict=True):
        mechanism = method.plan.mechanisms[client_id]
        assert mechanism.expected_batch_size == mechanism.sampling_rate * size
    assert method.plan.claim == "formal-conditional"
    assert "number included" in method.plan.claim_reason
    # What is spent with this number says nothing of others: the budget is what holds.
    ledger = method.plan.build_ledger()
    for client_id, budget in method.plan.budgets.items():
        assert method.plan.guaranteed_epsilon(ledger, client_id).best == budget.epsilon
    reasons = {(e.scope, e.reason) for e in method.plan.build_ledger().entries if e.reason != DRAWN_NOISE}
    assert reasons == {(client_id, "number of training examples") for client_id in method.clients.client_ids}


def test_it_is_released_once_for_all_methods_and_later_commands(experiment):
    config = experiment(privacy__num_examples=NOISED, training__test_only_seed=None)
    first = build_method(config, "mr_mtl")
    assert first.plan.mechanisms == build_method(config, "mr_mtl").plan.mechanisms
    assert first.plan.mechanisms == build_method(config, "fed_avg").plan.mechanisms
    assert first.config_hash == build_method(config, "mr_mtl").config_hash


def test_other_settings_do_not_release_again_in_silence(experiment):
    build_method(experiment(privacy__num_examples=NOISED), "mr_mtl")
    with pytest.raises(ConfigError, match="name another output folder"):
        build_method(experiment(privacy__num_examples={"kind": "noised", "epsilon": 0.3}), "mr_mtl")


def test_releases_that_cannot_be_read_are_not_made_again(experiment):
    config = experiment(privacy__num_examples=NOISED)
    build_method(config, "mr_mtl")
    (config.clients_folder.parent / RELEASES_FILE).write_text('{"silos": 3}')
    with pytest.raises(DataError, match=RELEASES_FILE):
        build_method(config, "mr_mtl")


def test_no_changed_byte_of_releases_is_silent_and_those_of_an_earlier_version_count(experiment):
    config = experiment(privacy__num_examples=NOISED)
    first = build_method(config, "mr_mtl")
    path = config.clients_folder.parent / RELEASES_FILE
    stored, expected = path.read_bytes(), read_releases(path)
    for place in range(0, len(stored), 3):
        path.write_bytes(stored[:place] + bytes([stored[place] ^ 1]) + stored[place + 1 :])
        try:
            assert read_releases(path) == expected
        except DataError as error:
            assert RELEASES_FILE in str(error)
    path.write_text(json.dumps(expected, indent=1) + "\n")
    again = build_method(config, "mr_mtl")
    assert again.config_hash == first.config_hash
    assert again.plan.build_ledger().to_json() == first.plan.build_ledger().to_json()
    assert path.read_bytes() != stored


def test_features_are_scaled_by_what_was_released(experiment):
    config = experiment(privacy__feature_scaling=MOMENTS)
    method = build_method(config, "mr_mtl")
    stored = json.loads((config.clients_folder.parent / RELEASES_FILE).read_text())["silos"]
    client_id = method.clients.client_ids[0]
    x = method.clients.load(client_id, "validation").x
    mean, stddev = (np.reshape(stored[client_id][key], x.shape[1:]) for key in ("mean", "stddev"))
    scaled = method.client_data("validation")[0]["x"][: len(x)]
    assert_within(scaled, (x - mean) / stddev, SCALED * (np.abs(x) + np.abs(mean)) / stddev)
    released = [entry for entry in method.plan.build_ledger().entries if entry.reason != DRAWN_NOISE]
    (entry,) = [entry for entry in released if entry.scope == client_id]
    assert entry.event.noise_multiplier == 20.0


def test_the_papers_standardisation_claims_nothing(experiment):
    method = build_method(experiment(privacy__feature_scaling=PAPER), "mr_mtl")
    assert method.plan.claim == "none"
    assert "standardised" in method.plan.claim_reason
    padded = method.client_data("train")[0]
    own = padded["x"][: padded["num_examples"]].astype(np.float64)
    x = method.clients.load(method.clients.client_ids[0], "train").x.astype(np.float64)
    deviation = np.where(np.ptp(x, axis=0) == 0, 1.0, x.std(axis=0))
    # The mean error is no larger than its root mean square, nor is what it moves a deviation by.
    rounded = SCALED * np.sqrt(np.square(np.abs(x) + np.abs(x.mean(axis=0))).mean(axis=0)) / deviation
    assert_within(own.mean(axis=0), np.zeros_like(deviation), rounded)
    # A feature that does not vary stays so.
    assert_within(own.std(axis=0), np.sign(np.ptp(x, axis=0)), rounded)


def test_the_papers_sampler_claims_nothing(experiment):
    method = build_method(experiment(privacy__sampler="paper_shuffled"), "mr_mtl")
    assert method.plan.claim == "none"
    assert method.plan.build_ledger() is not None
