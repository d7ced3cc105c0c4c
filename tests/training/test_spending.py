"""What a run may have spent is on its record before it is spent, whatever stops the run."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from tff_pdp.errors import BudgetError, DataError
from tff_pdp.lock import only_writer
from tff_pdp.privacy.plans.plan import DRAWN_NOISE
from tff_pdp.training import spending
from tff_pdp.training import train as training
from tff_pdp.training.evaluate import evaluate_experiment
from tff_pdp.training.record import checkpoint_files
from tff_pdp.training.record.arithmetic import of_first_version
from tff_pdp.training.record.charges import read_charges
from tff_pdp.training.record.releases import KNOWN_SEED, all_releases
from tff_pdp.training.train import train

NAME = "fed_avg"
LOOP = {"training__client_parallelism": "loop"}


def rounds_in(ledger, scope="silo_00"):
    return sum(entry.count for entry in ledger.entries if entry.scope == scope and entry.reason != DRAWN_NOISE)


def stop_in(monkeypatch, number):
    """The power goes out in a round, after its noise has been drawn."""
    real_round = training.run_round

    def failing_round(method, state, round_number, data):
        after = real_round(method, state, round_number, data)
        if round_number == number:
            raise RuntimeError("the power went out")
        return after

    monkeypatch.setattr(training, "run_round", failing_round)


def stopped(monkeypatch, config, number):
    with monkeypatch.context() as patch:
        stop_in(patch, number)
        with pytest.raises(RuntimeError):
            train(config, NAME, progress=False)
    return config.algorithm_folder(NAME)


def leaves(state):
    return [np.asarray(leaf) for leaf in tf.nest.flatten((state.server_state, list(state.client_states)))]


def are_equal(first, second):
    return all(np.array_equal(one, other) for one, other in zip(leaves(first), leaves(second), strict=True))


def pretend_first_version(folder):
    """Makes of a run what the first version of this project would have left."""
    for path in folder.glob("charges.*"):
        path.unlink()
    for saved in (folder / "checkpoints").glob("round_*"):
        path = saved / checkpoint_files.CONTENT_FILE
        content = json.loads(path.read_text())
        names = ("round_number", "config_hash", "ledger", "structure")
        path.write_text(json.dumps({"format_version": 2, **{name: content[name] for name in names}}))


def test_a_round_is_on_disk_before_it_is_run(experiment, monkeypatch):
    config = experiment(**LOOP)
    folder = config.algorithm_folder(NAME)
    real_round, seen = training.run_round, []

    def watched(method, state, round_number, data):
        charges = read_charges(folder)
        seen.append((charges.through_round, rounds_in(charges.ledger)))
        return real_round(method, state, round_number, data)

    monkeypatch.setattr(training, "run_round", watched)
    state = train(config, NAME, progress=False)
    per_round = rounds_in(state.ledger) // 6
    assert seen == [(number, number * per_round) for number in range(1, 7)]
    closed = read_charges(folder)
    assert closed.is_closed
    assert closed.identity.non_private == KNOWN_SEED
    assert closed.ledger.to_json() == state.ledger.to_json()


def test_a_hundredth_of_the_plan_is_reserved_at_a_time(experiment):
    config = experiment(training__rounds=250, training__checkpoint_every=1000, training__evaluate_every=1000, **LOOP)
    method = training.build_method(config, NAME)
    reserved = []

    class Writer:
        path = None
        begun = SimpleNamespace(attempt=SimpleNamespace(arithmetic={}, number=0), run_id="", chains=())

        def reserve(self, through_round, ledger, arithmetic):
            reserved.append((through_round, rounds_in(ledger)))

    state = SimpleNamespace(round_number=0, ledger=method.plan.build_ledger())
    own = spending.Spending(Writer(), method.plan, state, {}, SimpleNamespace(reserve=lambda *_: None))
    for number in range(1, 251):
        own.before_round(number)
    per_round = reserved[0][1] // 2
    assert reserved == [(number, number * per_round) for number in range(2, 251, 2)]


def test_a_run_stopped_before_its_first_checkpoint_stays_on_record_when_it_is_replaced(experiment, monkeypatch):
    config = experiment(training__checkpoint_every=1000, training__test_only_seed=None, **LOOP)
    stopped(monkeypatch, config, 3)
    (release,) = all_releases(config.algorithm_folder(NAME).parent)
    assert release.rounds == 3
    state = train(config, NAME, overwrite=True, progress=False)
    spent = {one.rounds: rounds_in(one.ledger) for one in all_releases(config.algorithm_folder(NAME).parent)}
    assert spent == {3: rounds_in(state.ledger) // 2, 6: rounds_in(state.ledger)}
    composed = evaluate_experiment(config, [NAME])["privacy"]["composed"]
    assert composed["methods"] == 2
    assert composed["epsilon"] > state.ledger.epsilon("silo_00").best


def test_a_reservation_is_taken_over_by_a_resumed_run(experiment, monkeypatch):
    whole = train(experiment("whole", **LOOP), NAME, progress=False)
    config = experiment("stopped", training__checkpoint_every=1000, **LOOP)
    stopped(monkeypatch, config, 4)
    resumed = train(config, NAME, resume=True, progress=False)
    assert are_equal(resumed, whole)
    assert read_charges(config.algorithm_folder(NAME)).ledger.to_json() == whole.ledger.to_json()


def other_machine(monkeypatch):
    monkeypatch.setattr(spending, "arithmetic_of", lambda *arguments, **named: {"processor": "another"})


def test_where_rounds_cannot_be_repeated_they_are_drawn_anew_and_charged_again(experiment, monkeypatch):
    roomy = {"privacy__noise_multiplier": 30.0, "training__checkpoint_every": 2, **LOOP}
    whole = train(experiment("whole", **roomy), NAME, progress=False)
    config = experiment("stopped", **roomy)
    folder = stopped(monkeypatch, config, 4)
    other_machine(monkeypatch)
    resumed = train(config, NAME, resume=True, progress=False)
    per_round = rounds_in(whole.ledger) // 6
    # Four rounds, and four after the second, which has a checkpoint.
    assert rounds_in(resumed.ledger) == 8 * per_round
    assert read_charges(folder).ledger.to_json() == resumed.ledger.to_json()
    assert (resumed.run_key.attempt, read_charges(folder).attempt.number) == (1, 1)
    assert not are_equal(resumed, whole)


def test_to_draw_rounds_anew_is_refused_where_it_would_overspend(experiment, monkeypatch):
    whole = train(experiment("whole", **LOOP), NAME, progress=False)
    config = experiment("stopped", **LOOP)
    folder = stopped(monkeypatch, config, 4)
    before = read_charges(folder)
    with monkeypatch.context() as patch:
        other_machine(patch)
        with pytest.raises(BudgetError, match="would overspend"):
            train(config, NAME, resume=True, progress=False)
    assert read_charges(folder).head == before.head
    # Where it was started, the run can go on all the same.
    assert are_equal(train(config, NAME, resume=True, progress=False), whole)


def test_a_second_writer_is_refused_with_the_first_ones_number(experiment):
    config = experiment(**LOOP)
    folder = config.algorithm_folder(NAME)
    with only_writer(folder), pytest.raises(DataError, match=rf"process \d+ writes to {folder}"):
        train(config, NAME, progress=False)
    assert not folder.exists()


def test_a_run_begun_by_other_code_is_drawn_anew_and_charged_again(experiment, monkeypatch):
    roomy = {"privacy__noise_multiplier": 30.0, "training__checkpoint_every": 2, **LOOP}
    whole = train(experiment("whole", **roomy), NAME, progress=False)
    config = experiment("stopped", **roomy)
    with monkeypatch.context() as patch:
        # Of the first version: its record has everything else.
        own = spending.arithmetic_of
        patch.setattr(spending, "arithmetic_of", lambda *given, **named: of_first_version(own(*given, **named)))
        folder = stopped(monkeypatch, config, 4)
    old = list(read_charges(folder).attempt.arithmetic.values())
    assert old and not any("sources" in one for one in old)
    resumed = train(config, NAME, resume=True, progress=False)
    per_round = rounds_in(whole.ledger) // 6
    # Four rounds, and four after the second, which has a checkpoint.
    assert rounds_in(resumed.ledger) == 8 * per_round
    assert (resumed.run_key.attempt, read_charges(folder).attempt.number) == (1, 1)
    new = list(read_charges(folder).attempt.arithmetic.values())
    assert all(len(one.pop("sources")) == 16 for one in new) and new[0] == old[0]
    assert not are_equal(resumed, whole)


def test_a_run_of_the_first_version_goes_on_and_counts(experiment, monkeypatch):
    roomy = {"privacy__noise_multiplier": 30.0, **LOOP}
    whole = train(experiment("whole", **roomy), NAME, progress=False)
    config = experiment("stopped", training__checkpoint_every=3, **roomy)
    folder = stopped(monkeypatch, config, 5)
    pretend_first_version(folder)
    per_round = rounds_in(whole.ledger) // 6
    (release,) = all_releases(folder.parent)
    assert (release.rounds, rounds_in(release.ledger)) == (3, 3 * per_round)
    # It may have run all rounds to its next checkpoint, which are drawn anew: its draws were others.
    resumed = train(config, NAME, resume=True, progress=False)
    assert resumed.round_number == 6 and resumed.run_key.attempt == 1
    assert rounds_in(resumed.ledger) == 9 * per_round
    (release,) = all_releases(folder.parent)
    assert release.ledger.to_json() == resumed.ledger.to_json()


def test_a_run_of_the_first_version_that_was_done_stays_as_it_is(experiment):
    config = experiment(**LOOP)
    whole = train(config, NAME, progress=False)
    folder = config.algorithm_folder(NAME)
    pretend_first_version(folder)
    assert are_equal(train(config, NAME, resume=True, progress=False), whole)
    (release,) = all_releases(folder.parent)
    assert release.ledger.to_json() == whole.ledger.to_json()


def test_a_run_of_the_first_version_that_cannot_be_drawn_anew_within_its_budget_is_refused(experiment, monkeypatch):
    config = experiment(training__checkpoint_every=2, **LOOP)
    folder = stopped(monkeypatch, config, 5)
    pretend_first_version(folder)
    with pytest.raises(BudgetError, match="would overspend"):
        train(config, NAME, resume=True, progress=False)
    # On record are the rounds it may have run.
    assert read_charges(folder).through_round == 6


def damages(whole):
    place = len(whole) // 2
    yield "emptied", b""
    yield "cut", whole[:-2]  # The last byte is the end of a line.
    yield "changed", whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]


def test_a_damaged_or_missing_file_of_a_run_is_named(experiment):
    config = experiment(**LOOP)
    done = train(config, NAME, progress=False)
    folder = config.algorithm_folder(NAME)
    saved = folder / "checkpoints" / "round_000006"
    names = ("config.json", "metrics.jsonl", "charges.jsonl", "charges.head")
    for path in [*(folder / name for name in names), *saved.iterdir()]:
        whole = path.read_bytes()
        for _, damaged in damages(whole):
            path.write_bytes(damaged)
            with pytest.raises(DataError, match=rf"{folder}.*{path.stem}\.") as error:
                train(config, NAME, resume=True, progress=False)
            assert "\n" not in str(error.value)
        path.unlink()
        with pytest.raises(DataError, match=rf"{folder}.*{path.stem}\."):
            train(config, NAME, resume=True, progress=False)
        path.write_bytes(whole)
    saved.rename(saved.with_name("round_000007"))
    with pytest.raises(DataError, match="round_000007 holds round 6"):
        train(config, NAME, resume=True, progress=False)
    saved.with_name("round_000007").rename(saved)
    assert are_equal(train(config, NAME, resume=True, progress=False), done)
