"""The spending of runs and sweeps, beside an accountant that is asked directly."""

from pathlib import Path

import dp_accounting
import numpy as np
import pytest

from tff_pdp.errors import ConfigError
from tff_pdp.privacy.accounting.accountants import epsilon_bounds
from tff_pdp.training.record.charges import read_charges

LAMBDAS = [0.03, 0.1, 0.3, 1.0, 3.0]


def epsilon_of(ledgers, scope):
    """The epsilon of all releases of some ledgers to one scope, at the largest delta."""
    entries = [entry for ledger in ledgers for entry in ledger.entries if entry.scope == scope]
    event = dp_accounting.ComposedDpEvent(
        [dp_accounting.SelfComposedDpEvent(entry.event, entry.count) for entry in entries]
    )
    delta = max(ledger.budgets[scope].delta for ledger in ledgers)
    return epsilon_bounds(event, delta, ledgers[0].adjacency).best


def test_spending_is_that_of_the_ledgers(trained):
    spent = trained.spent()
    ledgers = {name: read_charges(trained.config.algorithm_folder(name)).ledger for name in ("local_only", "mr_mtl")}
    for name, ledger in ledgers.items():
        own = spent.loc[name]
        assert own.index.to_list() == list(trained.client_ids)
        for silo, row in own.iterrows():
            assert row["epsilon_spent"] == pytest.approx(epsilon_of([ledger], silo), abs=1e-9)
            assert row["epsilon_left"] == row["epsilon_budget"] - row["epsilon_spent"] >= 0
            assert (row["epsilon_budget"], row["delta"]) == (ledger.budgets[silo].epsilon, 1e-4)
    together = spent.loc["all runs on record"]
    for silo, row in together.iterrows():
        assert row["epsilon_spent"] == pytest.approx(epsilon_of(list(ledgers.values()), silo), abs=1e-9)
        assert row["epsilon_spent"] > spent.loc[("mr_mtl", silo), "epsilon_spent"]


def test_no_epsilon_is_claimed_where_none_holds(build):
    made = build(training__test_only_seed=1)
    made.train(progress=False)
    spent = made.spent()
    assert np.isinf(spent["epsilon_spent"]).all()
    assert spent["why_no_bound"].str.contains("test_only_seed").all()


@pytest.fixture(scope="module")
def swept(trained):
    """A sweep over five values, and the experiment that it is of."""
    return trained, trained.sweep({"algorithms.mr_mtl.prox_weight": LAMBDAS}, test=False, progress=False)


def test_a_sweep_states_the_composed_epsilon(swept, capsys):
    made, (points, composed, text) = swept
    assert points["prox_weight"].to_list() == LAMBDAS
    assert set(points["algorithm"]) == {"mr_mtl"}
    ledgers = [read_charges(folder).ledger for folder in map(Path, points["folder"])]
    earlier = [read_charges(made.config.algorithm_folder(name)).ledger for name in ("local_only", "mr_mtl")]
    for silo in made.client_ids:
        alone = ledgers[0].epsilon(silo).best
        assert composed.loc[silo, "epsilon"] == pytest.approx(epsilon_of(ledgers, silo), abs=1e-9)
        assert composed.loc[silo, "all_epsilon"] == pytest.approx(epsilon_of([*ledgers, *earlier], silo), abs=1e-9)
        assert alone < composed.loc[silo, "epsilon"] < composed.loc[silo, "all_epsilon"]
    assert (composed["runs"] == 5).all() and (composed["all_runs"] == 7).all()
    worst = composed["epsilon"].idxmax()
    assert text.startswith(f"the 5 runs of this sweep together cost {worst} epsilon ")
    assert "all 7 releases on record on these records: epsilon " in text
    # Again: nothing is trained, and nothing is spent.
    again = made.sweep({"algorithms.mr_mtl.prox_weight": LAMBDAS}, test=False, progress=False)
    assert again.points.equals(points) and again.composed.equals(composed) and again.text == text
    assert capsys.readouterr().err == f"{text}\n"


def test_points_share_one_preparation_and_the_experiment_is_as_it_was(swept):
    made, (points, *_) = swept
    manifest = made.config.clients_folder / "manifest.json"
    for folder in map(Path, points["folder"]):
        assert (folder.parent / "clients" / "manifest.json").samefile(manifest)
    assert len({folder.parent for folder in map(Path, points["folder"])}) == 5
    assert made.config.algorithms["mr_mtl"]["prox_weight"] == 0.3


def test_a_sweep_of_other_settings_trains_and_tests_every_method(build):
    made = build()
    found = made.sweep({"training.rounds": [1], "privacy.clip_norm": np.array([0.5])}, progress=False)
    assert found.points[["rounds", "clip_norm", "algorithm"]].to_numpy().tolist() == [[1, 0.5, "mr_mtl"]]
    assert found.points[["validation", "mean", "worst_decile"]].apply(lambda column: column.between(0, 1)).all(None)
    assert found.text.startswith("the only run of this sweep costs silo_0") and "all" not in found.text
    assert "<table" in found._repr_html_() and found.text in found._repr_html_()
    for folder in map(Path, found.points["folder"]):
        page = (folder.parent / "report.html").read_text()
        assert "clip_norm" in page, "the report names what was swept"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"data.seed": [1, 2]}, "data.seed cannot be swept, because all points share data"),
        ({"output": ["a"]}, "output cannot be swept"),
        ({"privacy.registry": ["a"]}, "privacy.registry cannot be swept"),
        ({"algorithms.mr_mtl.prox_weight": 0.1}, "must be a list of the values to try, not 0.1"),
        ({"algorithms.mr_mtl.prox_weight": []}, "no value to try"),
        ({}, "no value to try"),
        ({"algorithms.mr_mtl.prox_wait": [1.0]}, "prox_wait"),
        ({"algorithms.mr_mtl.prox_weight": [0.1, -1.0]}, "prox_weight"),
        ({"training.rounds": [1, 0]}, "training.rounds must be a whole number of at least 1, not 0"),
    ],
    ids=str,
)
def test_a_faulty_sweep_trains_nothing(build, values, message):
    made = build()
    with pytest.raises(ConfigError, match=message):
        made.sweep(values, progress=False)
    assert [path.name for path in (made.config.clients_folder.parent).iterdir()] == ["clients"]
