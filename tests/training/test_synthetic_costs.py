"""The registry counts a release of synthetic data once in each folder, and releases in several folders together."""

import dp_accounting
import pytest

from tests.training.record.whole_runs import NAMES, SYNTHETIC, config_of
from tff_pdp.experiment.before_training import STATISTICS, released_id
from tff_pdp.experiment.build import build_method
from tff_pdp.experiment.prepare import prepare_clients
from tff_pdp.privacy.accounting.accountants import epsilon_bounds
from tff_pdp.privacy.synthetic.silo_data import SYNTHETIC as RELEASE
from tff_pdp.registry.entries import Registry
from tff_pdp.training.counted import cost_of_all_runs
from tff_pdp.training.record.charges import run_id_of
from tff_pdp.training.train import train

HPARAMS = {"learning_rate": 0.5, "local_steps": 1, "adaptation_steps": 2}
DELTA = SYNTHETIC["budgets"]["delta"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two experiments on the same records, in folders of their own and with one registry."""
    registry = str(tmp_path_factory.mktemp("registry"))
    configs = []
    for name in ("first", "second"):
        config = config_of(
            tmp_path_factory.mktemp(name),
            {**SYNTHETIC, "registry": registry},
            "fed_avg",
            **{"algorithms": {"fed_avg": HPARAMS}, "training.rounds": 3},
        )
        prepare_clients(config)
        configs.append(config)
    return configs


@pytest.fixture(scope="module")
def costs(folders):
    """Costs on record of every silo after the first release, the first run, the second release and the second run."""
    found, ledgers = [], []
    for config in folders:
        method = build_method(config, "fed_avg")
        found.append(cost_of_all_runs(config, method))
        ledgers.append(train(config, "fed_avg", progress=False).ledger)
        found.append(cost_of_all_runs(config, method))
    return found, ledgers


def composed(*entries):
    """Epsilon of entries of ledgers together."""
    events = [dp_accounting.SelfComposedDpEvent(entry.event, entry.count) for entry in entries]
    return epsilon_bounds(dp_accounting.ComposedDpEvent(events), DELTA).best


def test_costs_of_two_folders_add_up_and_no_release_counts_twice(costs):
    (released, first, released_again, both), ledgers = costs
    for silo in NAMES:
        one, other = ([entry for entry in ledger.entries if entry.scope == silo] for ledger in ledgers)
        (synthetic,) = [entry for entry in one if entry.reason == RELEASE]
        (synthetic_again,) = [entry for entry in other if entry.reason == RELEASE]
        assert synthetic.count == synthetic_again.count == 1
        expected = [
            (released, 1, composed(synthetic)),
            (first, 1, composed(*one)),
            (released_again, 2, composed(*one, synthetic_again)),
            (both, 2, composed(*one, *other)),
        ]
        for cost, releases, epsilon in expected:
            found = cost.by_scope[silo]
            assert found.releases == releases
            # Orders of composition round differently.
            assert found.epsilon == pytest.approx(epsilon, rel=1e-9)
        assert first.by_scope[silo].epsilon == pytest.approx(ledgers[0].epsilon(silo).best, rel=1e-9)
        assert first.by_scope[silo].epsilon <= SYNTHETIC["budgets"]["epsilon"] < both.by_scope[silo].epsilon
    assert (first.elsewhere, both.elsewhere) == (0, 1)


@pytest.mark.usefixtures("costs")
def test_the_entry_of_a_run_includes_the_release_of_its_folder(folders):
    entries = {entry.run_id: entry for entry in Registry(folders[0].privacy.registry).entries()}
    assert len(entries) == 4, "two releases and two runs"
    for config in folders:
        release, run = released_id(config), run_id_of(config.algorithm_folder("fed_avg"))
        assert (entries[release].method, entries[release].includes) == (STATISTICS, "")
        assert (entries[run].method, entries[run].includes) == ("fed_avg", release)
        assert entries[release].records == entries[run].records
