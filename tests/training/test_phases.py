"""Rounds on synthetic data, then on records: on every engine, and by every method that can train in phases."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from tests.rounding import probable_gamma
from tests.tiers import parameters
from tests.training.record.whole_runs import NAMES, NUM_TRAIN, SYNTHETIC, config_of
from tff_pdp.experiment.build import build_method
from tff_pdp.experiment.prepare import prepare_clients
from tff_pdp.privacy.plans.plan import DRAWN_NOISE
from tff_pdp.privacy.plans.silo_example import GRADIENTS
from tff_pdp.privacy.synthetic.silo_data import SYNTHETIC as RELEASE
from tff_pdp.training.train import train

EXAMPLES = SYNTHETIC["synthetic"]["generator"]["examples"]
ADAPTATION = {"adaptation_learning_rate": 0.5, "adaptation_steps": 2}
STEPS = {"learning_rate": 0.1, "local_steps": 2, **ADAPTATION}
# Settings by name; `kind` is the method where the name is not.
METHODS = {
    "fed_nova": STEPS,
    "scaffold": STEPS,
    "fed_prox": {**STEPS, "prox_weight": 0.1},
    "fed_meta_first": {"kind": "fed_meta", "order": "first", **STEPS},
    "fed_meta_second": {"kind": "fed_meta", "order": "second", **STEPS},
    "fed_meta_reptile": {"kind": "fed_meta", "order": "reptile", **STEPS},
    "pppfl": STEPS,
}
BUDGETS = {"kind": "cycled", "epsilons": [36.0, 40.0], "delta": 1e-3}


def config_with(folder, algorithms, **overrides):
    """An experiment with two rounds on synthetic data and one on records, of four prepared silos."""
    config = config_of(
        folder,
        {**SYNTHETIC, "budgets": BUDGETS},
        next(iter(algorithms)),
        **{
            "algorithms": algorithms,
            "training.rounds": 3,
            "training.test_only_seed": 1,
            "model.seed": 3,
            **overrides,
        },
    )
    if not config.clients_folder.exists():
        prepare_clients(config)
    return config


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A function: a method, and the end of its run; all methods train on the same synthetic data."""
    folder = tmp_path_factory.mktemp("phases")

    @functools.cache
    def run(name):
        weighting = {"training.weighting": "budget_softmax", "training.softmax_temperature": 4.0}
        config = config_with(folder, METHODS, **(weighting if name == "pppfl" else {}))
        return build_method(config, name), train(config, name, progress=False)

    return run


@pytest.mark.parametrize("name", parameters(METHODS, test=("scaffold", "pppfl")))
def test_every_method_trains_in_phases_and_pays_for_the_release_and_the_last_round(trained, name):
    method, state = trained(name)
    shared, first = method.algorithm.global_model(state.server_state["algorithm"]), method.model.init(3)
    assert all(np.isfinite(value).all() for value in shared.values())
    assert any(not np.array_equal(value, first[weight]) for weight, value in shared.items())
    assert len(state.client_states) == len(NAMES)
    for own in state.client_states:
        assert own["is_adapted"]
        assert all(np.isfinite(value).all() for value in own["weights"].values())
        assert any(not np.array_equal(value, shared[weight]) for weight, value in own["weights"].items())
    for silo in NAMES:
        spent = {
            reason: sum(one.count for one in state.ledger.entries if (one.scope, one.reason) == (silo, reason))
            for reason in {one.reason for one in state.ledger.entries}
        }
        assert spent == {RELEASE: 1, GRADIENTS: ADAPTATION["adaptation_steps"], DRAWN_NOISE: 1}
        budget = method.plan.budgets[silo]
        assert 0.99 * budget.epsilon < state.ledger.epsilon(silo).best <= budget.epsilon


ENGINES = {
    "loop": {"training.engine": "inprocess", "training.client_parallelism": "loop"},
    "vectorized": {"training.engine": "inprocess", "training.client_parallelism": "vectorized"},
    "native": {"training.engine": "native"},
}


@pytest.fixture(scope="module")
def on_engines(tmp_path_factory):
    """The end of one run in phases, by engine: with one seed, all have the same synthetic data and noise."""
    folder = tmp_path_factory.mktemp("engines")
    return {
        engine: train(config_with(folder, {"pppfl": STEPS}, **settings), "pppfl", overwrite=True, progress=False)
        for engine, settings in ENGINES.items()
    }


def test_weights_by_softmax_of_budgets_decide_the_shared_model(trained, on_engines):
    """Another weighting makes another shared model, from the same synthetic data and with the same seed."""
    method, by_budget = trained("pppfl")
    shared = method.algorithm.global_model
    found, expected = (shared(state.server_state["algorithm"]) for state in (by_budget, on_engines["loop"]))
    assert any(not np.array_equal(value, expected[weight]) for weight, value in found.items())
    # The budgets 36 and 40 are one temperature apart.
    amounts = [method.amounts[silo] for silo in NAMES]
    np.testing.assert_allclose(amounts, np.exp([-1.0, 0.0, -1.0, 0.0]))


@pytest.mark.parametrize("engine", ["vectorized", "native"])
def test_engines_agree_in_both_phases(on_engines, engine):
    expected, found = on_engines["loop"], on_engines[engine]
    assert found.ledger.to_json() == expected.ledger.to_json()
    for part in ("server_state", "client_states"):
        pairs = list(zip(tf.nest.flatten(getattr(found, part)), tf.nest.flatten(getattr(expected, part)), strict=True))
        largest = max(np.abs(other).max() for _, other in pairs if np.asarray(other).dtype.kind == "f")
        for one, other in pairs:
            one, other = np.asarray(one), np.asarray(other)
            assert (one.dtype, one.shape) == (other.dtype, other.shape)
            # Steps do not make errors grow: a gradient changes by no more than the weights do.
            bound = 2 * probable_gamma(_roundings()) * largest if one.dtype.kind == "f" else 0
            np.testing.assert_allclose(one, other, rtol=0, atol=bound)


def _roundings():
    """Counts the roundings in a row of a run: see `tests.contract.contract_support.roundings`."""
    weights = (2 + 1) * 4 + (4 + 1) * 2
    a_step = 6 * weights + max(NUM_TRAIN, EXAMPLES) + 64
    return 3 * (2 * 2 * a_step + 2 * len(NAMES))
