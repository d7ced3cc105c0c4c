"""All releases on record, composed for the records that they have in common."""

import math

import dp_accounting
import numpy as np
import pytest

from tests.registry.small_data import records
from tff_pdp.privacy.accounting.accountants import Adjacency, epsilon_bounds, poisson_gaussian_event
from tff_pdp.privacy.accounting.budgets import SiloBudget
from tff_pdp.privacy.accounting.events import ParameterChoiceDpEvent
from tff_pdp.privacy.accounting.ledger import Ledger
from tff_pdp.registry.entries import Registry
from tff_pdp.training.record.all_runs import OnRecord, Own, compose, releases_on_record
from tff_pdp.training.record.charges import CHARGES_FILE, ChargesWriter, RunIdentity, read_charges
from tff_pdp.training.record.releases import Release, enter


def ledger_of(**steps):
    ledger = Ledger("silo_example", Adjacency.ADD_OR_REMOVE_ONE, dict.fromkeys(steps, SiloBudget(50.0, 1e-4)))
    for silo, number in steps.items():
        ledger.append(silo, poisson_gaussian_event(0.1, 2.0, 1), number, "DP-SGD training")
    return ledger


def epsilon(steps):
    event = dp_accounting.SelfComposedDpEvent(poisson_gaussian_event(0.1, 2.0, 1), steps)
    return epsilon_bounds(event, 1e-4).best


@pytest.fixture
def registry(tmp_path):
    return Registry(tmp_path / "registry")


def release(registry, clients, ledger, run="mr_mtl", *, is_here=False, non_private=None):
    name = registry.keep_examples(list(clients), list(clients.values()))
    return OnRecord(Release(ledger, non_private, run, 5, run), "elsewhere", name, None, is_here)


def own(registry, clients):
    return Own(registry.keep_examples(list(clients), list(clients.values())), None, list(clients))


def test_a_record_pays_each_run_that_it_was_in_and_no_other(registry):
    """Of two silos, one record of the first was in another run's silo, and none of the second."""
    clients = {"a": records(0, 10), "b": records(10, 20)}
    found = [
        release(registry, clients, ledger_of(a=10, b=10)),
        release(registry, {"p": records(9, 10), "q": records(30, 40)}, ledger_of(p=20, q=500), "fed_avg"),
    ]
    cost = compose(registry, found, own(registry, clients))
    assert cost.by_scope["a"].epsilon == epsilon(30)
    assert cost.by_scope["b"].epsilon == epsilon(10)
    assert (cost.by_scope["a"].releases, cost.by_scope["b"].releases, cost.runs, cost.elsewhere) == (2, 1, 2, 2)
    assert (cost.worst.epsilon, cost.worst.delta) == (epsilon(30), 1e-4)


def test_records_that_were_divided_anew_pay_once(registry):
    clients = {"a": records(0, 10)}
    halves = {"p": records(0, 5), "q": records(5, 10)}
    found = [release(registry, halves, ledger_of(p=10, q=20))]
    assert compose(registry, found, own(registry, clients)).by_scope["a"].epsilon == epsilon(20)


def test_a_record_in_two_silos_of_a_run_pays_for_both(registry):
    found = [release(registry, {"p": records(0, 1), "q": records(0, 1)}, ledger_of(p=10, q=20))]
    assert compose(registry, found, own(registry, {"a": records(0, 3)})).by_scope["a"].epsilon == epsilon(30)


def test_a_unit_in_several_records_pays_for_all_of_them(registry):
    """As a person of a contact graph does, whose rows are in two runs, one in each."""
    clients = {"a": records(0, 10)}
    found = [
        release(registry, {"p": records(0, 1)}, ledger_of(p=10), "one"),
        release(registry, {"q": records(1, 2)}, ledger_of(q=20), "two"),
    ]
    asked = own(registry, clients)
    assert compose(registry, found, asked).worst.epsilon == epsilon(20)
    assert compose(registry, found, asked._replace(is_unit_in_several=True)).worst.epsilon == epsilon(30)


def test_many_kinds_of_records_are_bounded_together(registry):
    clients = {"a": records(0, 70)}
    shares = {f"s{number}": records(number, number + 1) for number in range(70)}
    found = [release(registry, shares, ledger_of(**dict.fromkeys(shares, 1)))]
    assert compose(registry, found, own(registry, clients)).by_scope["a"].epsilon == epsilon(70)
    few = {name: shares[name] for name in list(shares)[:60]}
    found = [release(registry, few, ledger_of(**dict.fromkeys(few, 1)))]
    assert compose(registry, found, own(registry, clients)).by_scope["a"].epsilon == epsilon(1)


def test_a_run_without_privacy_leaves_no_bound_for_the_silos_it_was_about(registry):
    clients = {"a": records(0, 10), "b": records(10, 20)}
    found = [
        release(registry, clients, ledger_of(a=10, b=10)),
        release(registry, {"p": records(9, 10)}, None, "fed_avg", non_private="privacy is switched off"),
    ]
    cost = compose(registry, found, own(registry, clients))
    assert (cost.by_scope["a"].epsilon, cost.by_scope["b"].epsilon) == (math.inf, epsilon(10))
    assert cost.worst.why_no_bound == ("a run on record (fed_avg in elsewhere) has no bound: privacy is switched off")
    content = cost.by_scope["a"].to_dict("formal", "")
    assert (content["claim"], content["epsilon"]) == ("none", None)
    assert cost.by_scope["b"].to_dict("formal", "")["epsilon"] == epsilon(10)


def test_a_run_whose_parameters_a_noised_number_chose_counts_with_its_budget(registry):
    """What was spent says nothing of what would have been with another number."""
    clients = {"a": records(0, 10)}
    choice, plain = ledger_of(a=10), ledger_of(a=10)
    choice.append("a", ParameterChoiceDpEvent(0.1), 1, "number of training examples")
    found = [release(registry, clients, ledger, name) for ledger, name in ((choice, "one"), (plain, "two"))]
    cost = compose(registry, found, own(registry, clients))
    assert (cost.worst.epsilon, cost.worst.delta) == (50.0 + epsilon(10), 2e-4)
    two_choices = [release(registry, clients, choice, name) for name in ("one", "two")]
    cost = compose(registry, two_choices, own(registry, clients))
    assert (cost.worst.epsilon, cost.worst.delta) == (100.0, 2e-4)


def test_nothing_on_record_costs_nothing(registry):
    cost = compose(registry, [], own(registry, {"a": records(0, 10)}))
    assert (cost.worst.epsilon, cost.runs, cost.notes) == (0.0, 0, ())


def test_a_run_without_digests_counts_by_the_names_of_its_silos_and_is_told(registry, tmp_path):
    enter(tmp_path, Release(ledger_of(a=10, z=10), None, "mr_mtl", 3))
    found = releases_on_record(registry, tmp_path)
    cost = compose(registry, found, own(registry, {"a": records(0, 10), "b": np.zeros((0, 3), np.float32)}))
    assert (cost.by_scope["a"].epsilon, cost.by_scope["b"].epsilon) == (epsilon(10), 0.0)
    assert cost.notes == (
        f"mr_mtl in {tmp_path}: on record without digests of records, and counted as being about the same records",
    )


def start(registry, folder, ledger, planned):
    folder.mkdir(parents=True)
    identity = RunIdentity("mr_mtl", None, "key", "hash", "0" * 64)
    with ChargesWriter(folder) as writer:
        writer.open_run(identity, None)
        registry.begin(
            identity.run_id,
            "mr_mtl",
            folder,
            records=registry.keep_examples(["a"], [records(0, 5)]),
            record_set=None,
            non_private=None,
            ledger=planned,
            rounds=10,
        )
        if ledger:
            writer.reserve(4, ledger, {})
    return identity.run_id


def spent(registry, output):
    return [one.release.ledger and one.release.ledger.entries[0].count for one in releases_on_record(registry, output)]


def test_a_run_counts_as_its_folder_says_and_by_the_plan_once_that_is_gone(registry, tmp_path):
    start(registry, tmp_path / "one" / "mr_mtl", ledger_of(a=4), ledger_of(a=10))
    for output in ("one", "two"):
        assert spent(registry, tmp_path / output) == [4]
    (tmp_path / "one").rename(tmp_path / "moved")
    assert spent(registry, tmp_path / "two") == [10]
    # Found again by who asks for its folder.
    assert spent(registry, tmp_path / "moved") == [4]
    path = tmp_path / "moved" / "mr_mtl" / CHARGES_FILE
    (tmp_path / "moved").rename(tmp_path / "one")
    path = tmp_path / "one" / "mr_mtl" / CHARGES_FILE
    path.write_bytes(path.read_bytes()[:-3] + b"x\n\n")
    assert spent(registry, tmp_path / "two") == [10], "a damaged folder does not hide what was planned"


def test_a_folder_that_was_restored_from_an_older_copy_does_not_lower_what_was_spent(registry, tmp_path):
    run_id = start(registry, tmp_path / "one" / "mr_mtl", ledger_of(a=4), ledger_of(a=10))
    chains = read_charges(tmp_path / "one" / "mr_mtl").chains
    registry.reserve(run_id, chains)
    registry.close(run_id, [*chains, "a later line"], 10, ledger_of(a=9))
    for output in ("one", "two"):
        assert spent(registry, tmp_path / output) == [9]


def test_a_run_that_released_nothing_does_not_count(registry, tmp_path):
    run_id = start(registry, tmp_path / "one" / "mr_mtl", None, ledger_of(a=10))
    assert spent(registry, tmp_path / "two") == []
    registry.close(run_id, read_charges(tmp_path / "one" / "mr_mtl").chains, 0, None)
    (tmp_path / "one").rename(tmp_path / "moved")
    assert spent(registry, tmp_path / "two") == []
