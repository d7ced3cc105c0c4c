"""Rounds on synthetic data, then on records: on every engine, and by every method that can train in phases."""

import numpy as np
import pytest
import tensorflow as tf

from tests.rounding import probable_gamma
from tests.training.record.whole_runs import NAMES, NUM_TRAIN, SYNTHETIC, config_of
from tff_pdp.experiment.build import build_method
from tff_pdp.experiment.prepare import prepare_clients
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
def folder(tmp_path_factory):
    """Where all methods of this module train on the same synthetic data."""
    return tmp_path_factory.mktemp("phases")


@pytest.mark.parametrize("name", list(METHODS))
def test_every_method_trains_in_phases_and_pays_for_the_release_and_the_last_round(folder, name):
    config = config_with(folder, METHODS, **{"training.weighting": "budget_softmax" if name == "pppfl" else "uniform"})
    method, state = build_method(config, name), train(config, name, progress=False)
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
        assert spent == {RELEASE: 1, GRADIENTS: ADAPTATION["adaptation_steps"]}
        budget = method.plan.budgets[silo]
        assert 0.99 * budget.epsilon < state.ledger.epsilon(silo).best <= budget.epsilon


def test_weights_by_softmax_of_budgets_decide_the_shared_model(folder):
    """With the same run key, the two weightings give other shared models; with equal weights, they would not."""
    models = []
    for weighting in ("uniform", "budget_softmax"):
        config = config_with(folder, METHODS, **{"training.weighting": weighting})
        state = train(config, "pppfl", overwrite=True, progress=False)
        models.append(build_method(config, "pppfl").algorithm.global_model(state.server_state["algorithm"]))
    uniform, by_budget = models
    assert any(not np.array_equal(value, by_budget[weight]) for weight, value in uniform.items())


ENGINES = {
    "loop": {"training.engine": "inprocess", "training.client_parallelism": "loop"},
    "vectorized": {"training.engine": "inprocess", "training.client_parallelism": "vectorized"},
    "native": {"training.engine": "native"},
}


@pytest.fixture(scope="module")
def on_engines(tmp_path_factory):
    """The end of one run in phases, by engine and method: with one seed, all read the same data and noise."""
    folder = tmp_path_factory.mktemp("engines")
    methods = {"fed_avg": STEPS, "pppfl": STEPS}
    return {
        (engine, name): train(config_with(folder, methods, **settings), name, overwrite=True, progress=False)
        for engine, settings in ENGINES.items()
        for name in methods
    }


@pytest.mark.parametrize("name", ["fed_avg", "pppfl"])
@pytest.mark.parametrize("engine", ["vectorized", "native"])
def test_engines_agree_in_both_phases(on_engines, engine, name):
    expected, found = on_engines["loop", name], on_engines[engine, name]
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
