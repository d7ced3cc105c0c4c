"""What each client is given: its own mechanism, its own seed and its own examples, in the order of the clients."""

import dataclasses

import numpy as np
import pytest

from tff_pdp.algorithms.hyper_parameters import BUDGET_EPSILON, SET_BY_RUNTIME
from tff_pdp.data.client_dataset import ClientDataset
from tff_pdp.experiment import examples
from tff_pdp.experiment.build import build_method
from tff_pdp.experiment.run_key import RunKey


@pytest.fixture
def method(experiment):
    return build_method(experiment(algorithms={"mr_mtl": {"prox_weight": 0.5, "local_steps": 3}}), "mr_mtl")


def test_each_client_gets_the_mechanism_of_the_plan_and_a_seed_of_its_own(method):
    key = RunKey.from_test_seed(3)
    params = method.client_params(key, 7)
    assert len(params) == len(method.clients.client_ids)
    for client_id, own in zip(method.clients.client_ids, params, strict=True):
        mechanism = dataclasses.asdict(method.plan.mechanisms[client_id])
        assert dict(own["mechanism"]) == {name: np.float32(value) for name, value in mechanism.items()}
        # Rates and noise multipliers are floats of 32 bits already: nothing is rounded after the calibration.
        for name in ("sampling_rate", "noise_multiplier"):
            assert float(own["mechanism"][name]) == mechanism[name]
        np.testing.assert_array_equal(own["seed"], key.client_seed(7, client_id))
        assert dict(own["hparams"]) == {
            "learning_rate": np.float32(0.1),
            "local_steps": np.int32(3),
            "prox_weight": np.float32(0.5),
        }
    assert len({tuple(own["seed"]) for own in params}) == len(params)
    assert len({float(own["mechanism"]["noise_multiplier"]) for own in params}) == len(params), "budgets differ"


@pytest.mark.parametrize("kind", ["silo_example", "none"])
def test_each_client_gets_its_number_and_the_epsilon_of_its_own_budget(experiment, kind):
    method = build_method(experiment(privacy__kind=kind), "mr_mtl")
    hparams = {"client_index": SET_BY_RUNTIME, "budget_epsilon": BUDGET_EPSILON, **method.algorithm.hparams}
    method = dataclasses.replace(method, algorithm=dataclasses.replace(method.algorithm, hparams=hparams))
    params = method.client_params(RunKey.from_test_seed(3), 1, places=[2, 0])
    for place, own in zip([2, 0], params, strict=True):
        budget = method.plan.budgets.get(method.clients.client_ids[place])
        epsilon = own["hparams"]["budget_epsilon"]
        assert epsilon.dtype == np.float32 and epsilon == np.float32(np.inf if budget is None else budget.epsilon)
        assert own["hparams"]["client_index"] == place
    assert bool(method.plan.budgets) == (kind == "silo_example")


@pytest.mark.parametrize("split", ["train", "validation"])
def test_each_client_gets_its_examples_and_zeros(method, split):
    sizes = set()
    for client_id, own in zip(method.clients.client_ids, method.client_data(split), strict=True):
        loaded = method.clients.load(client_id, split)
        size = len(loaded.y)
        assert own["num_examples"] == size <= len(own["y"]) == len(own["x"])
        np.testing.assert_array_equal(own["x"][:size], loaded.x)
        np.testing.assert_array_equal(own["y"][:size], loaded.y)
        assert not own["x"][size:].any() and not own["y"][size:].any()
        sizes.add(size)
    assert len(sizes) > 1, "nothing to pad"


@pytest.mark.parametrize("kept_bytes", [0, 2**30])
def test_selected_clients_get_their_examples_whether_a_split_is_kept_or_not(method, monkeypatch, kept_bytes):
    monkeypatch.setattr(examples, "_KEPT_BYTES", kept_bytes)
    reader = method.examples("train")
    reads = []

    def load_many(places, split):
        reads.append(places.tolist())
        return type(method.clients).load_many(method.clients, places, split)

    monkeypatch.setattr(method.clients, "load_many", load_many)
    everyone = list(method.client_data("validation"))
    assert [len(own["y"]) > 0 for own in everyone] == [True] * len(method.clients.client_ids)
    for places in ([2, 0], [0, 1], [2]):
        for place, own in zip(places, reader.select(places), strict=True):
            expected = ClientDataset.open(method.clients.path).load(method.clients.client_ids[place], "train")
            size = int(own["num_examples"])
            np.testing.assert_array_equal(own["x"][:size], expected.x)
            np.testing.assert_array_equal(own["y"][:size], expected.y)
            assert not own["x"][size:].any() and not own["y"][size:].any()
    # A split that is kept is read once, client by client; the first read is of validation.
    assert reads[1:] == ([[0, 2], [1]] if kept_bytes else [[2, 0], [0, 1], [2]])
