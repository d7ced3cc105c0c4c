"""Silos that leave, silos that take as many steps as they have batches, and what the ledger says of both."""

import numpy as np
import pytest

from tests.rounding import network_roundings, probable_gamma
from tests.tiers import parameters
from tff_pdp.errors import ConfigError
from tff_pdp.experiment.build import build_method, experiment_engine
from tff_pdp.privacy.plans.plan import DRAWN_NOISE
from tff_pdp.training import train as training
from tff_pdp.training.rounds import first_state, run_round
from tff_pdp.training.train import train as run_to_the_end

BUDGETS = {"kind": "cycled", "epsilons": [1.0, 1.6, 20.0], "delta": 1e-4}
LEAVING = {
    "privacy__noise_multiplier": 3.0,
    "privacy__budgets": BUDGETS,
    "training__rounds": 12,
    "privacy__batch_size": 180,
}


def train(config, name):
    method = build_method(config, name)
    with experiment_engine(config):
        state, data = first_state(method, config.training.test_only_seed), method.client_data("train")
        states = []
        for number in range(1, config.training.rounds + 1):
            state = run_round(method, state, number, data)
            states.append([np.asarray(one["weights"]["dense_0/kernel"]) for one in state.client_states if one])
    return method, state, states


@pytest.fixture(params=parameters(["loop", "vectorized"], test=["loop"]))
def leavers(request, experiment):
    """MR-MTL with given noise: the first silo's budget is spent first."""
    return train(experiment(**LEAVING, training__client_parallelism=request.param), "mr_mtl")


def test_a_silo_that_has_left_keeps_its_model_while_the_others_train(leavers):
    method, _, states = leavers
    last = [method.plan.last_rounds[client_id] for client_id in method.clients.client_ids]
    assert 0 < last[0] < last[1] < last[2] == 12, "this test needs silos that leave at different rounds"
    for client, leaves_after in enumerate(last):
        for number in range(2, 13):
            stayed = np.array_equal(states[number - 1][client], states[number - 2][client])
            assert stayed == (number > leaves_after)


def test_the_ledger_is_charged_for_the_rounds_a_silo_took_part_in(leavers):
    method, state, _ = leavers
    for client_id, budget in method.plan.budgets.items():
        noise, entry = [entry for entry in state.ledger.entries if entry.scope == client_id]
        assert (noise.reason, noise.count) == (DRAWN_NOISE, 1)
        assert entry.count == method.plan.last_rounds[client_id]
        assert state.ledger.epsilon(client_id).best <= budget.epsilon


def test_when_all_have_left_nothing_moves(experiment):
    budgets = {"kind": "one_for_all", "delta": 1e-4, "epsilon": 1.2}
    method, state, states = train(experiment(**{**LEAVING, "privacy__budgets": budgets}), "mr_mtl")
    last = max(method.plan.last_rounds.values())
    assert last < 11
    for one, other in zip(states[last], states[-1], strict=True):
        np.testing.assert_array_equal(one, other)
    assert state.round_number == 12


def test_a_step_for_each_batch_of_an_epoch(experiment):
    algorithms = {"ditto": {"local_steps": "epoch", "learning_rate": 0.1}}
    config = experiment(algorithms=algorithms, export__algorithm="ditto", privacy__batch_size=16)
    method = build_method(config, "ditto")
    sizes = [method.clients.num_examples(client_id, "train") for client_id in method.clients.client_ids]
    assert method.hparams["local_steps"].tolist() == [max(1, size // 16) for size in sizes]
    assert len(set(method.hparams["local_steps"].tolist())) > 1
    # Ditto passes over the data twice.
    assert list(method.plan.gradients_per_round.values()) == [2 * max(1, size // 16) for size in sizes]


def test_selection_is_charged_in_its_rounds(experiment):
    algorithms = {"ifca_mr_mtl": {"num_clusters": 2, "selection_fraction": 0.5}}
    config = experiment(algorithms=algorithms, export__algorithm="ifca_mr_mtl")
    method, state, _ = train(config, "ifca_mr_mtl")
    for client_id in method.clients.client_ids:
        counts = {entry.reason: entry.count for entry in state.ledger.entries if entry.scope == client_id}
        assert counts == {"DP-SGD training": 6, "private cluster selection": 3, DRAWN_NOISE: 1}
    assert {int(one["cluster"]) for one in state.client_states} <= {0, 1}


@pytest.mark.parametrize(
    ("algorithms", "message"),
    [
        ({"ifca": {"num_clusters": 0}}, "algorithms.ifca.num_clusters"),
        ({"ifca": {"clusters": 3}}, "unknown key algorithms.ifca.clusters;"),
        ({"finetune": {"federated_fraction": 1.5}}, "algorithms.finetune.federated_fraction"),
        ({"mr_mtl": {"prox_inside_clip": 1}}, "algorithms.mr_mtl.prox_inside_clip"),
        (
            {"ditto": {"prox_weight": "auto"}},
            "algorithms.ditto.prox_weight must be a number of at least 0, not 'auto'$",
        ),
        ({"mocha": {"client_index": 3}}, "^algorithms.mocha.client_index cannot be set, because "),
        ({"mr_mtl": {"local_steps": "epochs"}}, "or epochs, such as '5 epochs', not 'epochs'"),
        ({"ifca": {"rounds": 3}}, "unknown key algorithms.ifca.rounds;"),
    ],
)
def test_settings_of_methods_that_mean_nothing(experiment, algorithms, message):
    name = next(iter(algorithms))
    with pytest.raises(ConfigError, match=message):
        build_method(experiment(algorithms=algorithms, export__algorithm=name), name)


def test_what_the_server_is_told_besides_is_named_in_the_claim(experiment):
    given = {"algorithms": {"fed_nova": {"local_steps": "epoch"}}, "export__algorithm": "fed_nova"}
    method = build_method(experiment(**given), "fed_nova")
    assert "silos' steps, whose mean the server is told, are treated as public" in method.plan.claim_reason


def test_gradients_after_the_local_steps_are_charged_alike(experiment):
    algorithms = {"fed_avg": {"local_steps": 5}, "fed_meta": {"local_steps": 2, "query_steps": 3}}
    config = experiment(algorithms=algorithms, export__algorithm="fed_avg")
    fed_avg, fed_meta = (build_method(config, name).plan for name in algorithms)
    assert fed_meta.mechanisms == fed_avg.mechanisms


@pytest.mark.parametrize("name", parameters(["fed_avg", "mr_mtl", "mocha", "ifca_fed_avg"], test=["fed_avg", "mocha"]))
def test_silos_count_by_their_examples_where_that_is_asked_for(experiment, name):
    settings = {"num_clusters": 1} if name.startswith("ifca") else {}
    given = {"algorithms": {name: settings}, "export__algorithm": name, "training__rounds": 1, "privacy__kind": "none"}
    alone = train(
        experiment(**given | {"algorithms": {"local_only": {}}, "export__algorithm": "local_only"}), "local_only"
    )[1]
    method, state, _ = train(experiment(**given, training__weighting="num_examples"), name)
    sizes = [method.plan.num_examples[client_id] for client_id in method.clients.client_ids]
    assert len(set(sizes)) > 1
    trained = [np.asarray(one["weights"]["dense_0/kernel"]) for one in alone.client_states]
    server = state.server_state["algorithm"]
    # A step of each program, from the same batch, and the server's weighted sum and its quotient.
    roundings = network_roundings(method.model.init(0), max(sizes)) + 2 * len(sizes) + 1
    bound = 2 * probable_gamma(roundings) * np.abs(trained).max()
    if name == "mocha":
        # A matrix of rows is no mean.
        np.testing.assert_allclose(server["rows"]["dense_0/kernel"], trained, rtol=0, atol=bound)
        return
    (found,) = (server[key]["dense_0/kernel"] for key in ("weights", "mean", "centroids") if key in server)
    np.testing.assert_allclose(np.squeeze(found), np.average(trained, axis=0, weights=sizes), rtol=0, atol=bound)


AUTO = {"algorithms": {"mr_mtl": {"prox_weight": "auto", "learning_rate": 0.3}}, "training__rounds": 40}


@pytest.mark.parametrize("client_parallelism", parameters(["loop", "vectorized"], test=["loop"]))
def test_lambda_is_set_from_what_silos_release(experiment, client_parallelism):
    config = experiment(**AUTO, training__client_parallelism=client_parallelism)
    method, state, _ = train(config, "mr_mtl")
    everyone = np.arange(len(state.client_ids))
    first = method.hook.hparams(method.hook.init(), everyone)["prox_weight"]
    last = method.hook.hparams(state.hook, everyone)["prox_weight"]
    assert last.shape == (len(state.client_ids),)
    assert not np.array_equal(first, last)
    # It costs nothing: the ledger holds the gradients, and nothing else.
    counts = {(entry.reason, entry.count) for entry in state.ledger.entries}
    assert counts == {("DP-SGD training", 40), (DRAWN_NOISE, 1)}


def test_lambda_of_a_run_that_is_resumed_is_set_from_all_its_rounds(experiment):
    whole = run_to_the_end(experiment("whole", **AUTO), "mr_mtl", progress=False)
    config = experiment("resumed", **AUTO)
    stopped = []

    def stop(*arguments):
        if len(stopped) == 25:
            raise KeyboardInterrupt
        stopped.append(arguments)
        return run_round(*arguments)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(training, "run_round", stop)
        run_to_the_end(config, "mr_mtl", progress=False)
    resumed = run_to_the_end(config, "mr_mtl", resume=True, progress=False)
    np.testing.assert_array_equal(whole.hook["prox_weights"], resumed.hook["prox_weights"])
    for one, other in zip(whole.client_states, resumed.client_states, strict=True):
        for name in one["weights"]:
            np.testing.assert_array_equal(one["weights"][name], other["weights"][name])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (LEAVING, "every silo in every round"),
        ({"privacy__kind": "none"}, "train with privacy"),
        ({"algorithms": {"mr_mtl": {"prox_weight": "auto", "prox_inside_clip": True}}}, "prox_inside_clip"),
    ],
)
def test_where_lambda_cannot_be_set(experiment, changes, message):
    with pytest.raises(ConfigError, match=message):
        build_method(experiment(**{**AUTO, **changes}), "mr_mtl")
