"""Training with random bits of ChaCha20, from a configuration to what is claimed."""

import numpy as np
import pytest
import tensorflow as tf

from tests.training.stopping import stop_before
from tff_pdp.errors import ConfigError
from tff_pdp.experiment.build import build_method
from tff_pdp.training.evaluate import evaluate_experiment
from tff_pdp.training.record.arithmetic import arithmetic_of
from tff_pdp.training.train import train

USERS = {
    "kind": "user",
    "batch_size": 16,
    "clip_norm": 0.5,
    "users_per_round": 1.5,
    "num_users": 3,
    "budgets": {"kind": "one_for_all", "epsilon": 5.0, "delta": 1e-3},
}
# A cluster's selection, batches and noise of silos; noise of users' sums, and of counts.
KINDS = {
    "silos": {"algorithms": {"ifca_mr_mtl": {"num_clusters": 2}}, "export__algorithm": "ifca_mr_mtl"},
    "users": {
        "algorithms": {"fed_avg": {}},
        "export__algorithm": "fed_avg",
        "privacy": {**USERS, "user_noise": {"kind": "adaptive_clip", "count_stddev": 5.0}},
        "tuning": {},
    },
}


@pytest.fixture(params=KINDS)
def build(request, experiment):
    """A function that builds a small experiment of silos or of users, and its one method."""

    def build_one(name, generator, **overrides):
        # Overrides change the mapping in place.
        given = {key: dict(value) if key == "privacy" else value for key, value in KINDS[request.param].items()}
        config = experiment(name, **{**given, "privacy__generator": generator, **overrides})
        return config, config.export.algorithm

    return build_one


def weights_of(state):
    return [np.asarray(leaf) for leaf in tf.nest.flatten(state.server_state["algorithm"])]


def are_equal(first, second):
    return all(np.array_equal(*pair) for pair in zip(weights_of(first), weights_of(second), strict=True))


@pytest.mark.parametrize("parallelism", ["loop", "vectorized"])
def test_a_run_that_failed_midway_resumes_to_the_same_bits(build, monkeypatch, parallelism):
    whole = train(*build("whole", "chacha20", training__client_parallelism=parallelism), progress=False)
    config, name = build("stopped", "chacha20", training__client_parallelism=parallelism)
    with monkeypatch.context() as patch:
        stop_before(patch, 4)
        with pytest.raises(RuntimeError):
            train(config, name, progress=False)
    resumed = train(config, name, resume=True, progress=False)
    assert are_equal(whole, resumed)
    assert resumed.ledger.to_json() == whole.ledger.to_json()


def test_generators_draw_otherwise_cost_the_same_and_are_not_changed_in_a_run(build):
    config, name = build("chacha20", "chacha20")
    one = train(config, name, progress=False)
    other = train(*build("philox", "philox"), progress=False)
    assert one.run_key.secret == other.run_key.secret
    assert not are_equal(one, other)
    assert one.ledger.to_json() == other.ledger.to_json()
    changed, _ = build("chacha20", "philox")
    with pytest.raises(ConfigError, match="other settings"):
        train(changed, name, resume=True, progress=False)
    with pytest.raises(ConfigError, match=r"privacy\.generator must be one of chacha20, philox, not 'mersenne'"):
        build("unknown", "mersenne")


@pytest.mark.parametrize(
    ("generator", "claim", "words"),
    [("philox", "formal-conditional", "is no cryptographic generator"), ("chacha20", "formal", "is computational")],
)
def test_users_are_told_what_the_guarantee_hangs_on(experiment, generator, claim, words):
    config = experiment(
        **{**KINDS["users"], "privacy": {**USERS, "generator": generator}}, training__test_only_seed=None
    )
    train(config, "fed_avg", progress=False)
    privacy = evaluate_experiment(config)["privacy"]
    assert privacy["claim"] == privacy["composed"]["claim"] == claim
    assert ("Philox" in privacy["claim_reason"]) == ("Philox" in privacy["composed"]["claim_reason"])
    assert ("Philox" in privacy["claim_reason"]) == (generator == "philox")
    page = (config.clients_folder.parent / "report.html").read_text()
    assert words in page
    if generator == "chacha20":
        assert "cryptographic" not in page
        # Of the run that this one replaces nobody knows what drew.
        train(config, "fed_avg", overwrite=True, progress=False)
        composed = evaluate_experiment(config)["privacy"]["composed"]
        assert (composed["methods"], composed["claim"]) == (2, "formal-conditional")
        assert "other runs on record may be Philox's" in composed["claim_reason"]


def test_rounds_are_drawn_anew_with_another_generator(experiment):
    given = {"engine": "inprocess", "device": "cpu", "is_deterministic": True}
    assert arithmetic_of(**given) == arithmetic_of(**given, generator="philox")
    assert arithmetic_of(**given, generator="chacha20") == {**arithmetic_of(**given), "generator": "chacha20"}
    plan = build_method(experiment(privacy__generator="chacha20"), "mr_mtl").plan
    assert plan.generator == "chacha20"
    assert plan.claim_reason.startswith(
        "the number of training examples of each silo is treated as public; an example's"
    )
