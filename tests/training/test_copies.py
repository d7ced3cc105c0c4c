"""Copies of a run's folder: one goes on, or all do the same; whatever any of them has released counts."""

import contextlib
import json
import shutil

import pytest

from tests.training.test_counted import NAME, ONE, by_hand
from tff_pdp import journal
from tff_pdp.digests import write_json
from tff_pdp.errors import ConfigError, DataError
from tff_pdp.experiment.build import build_method, experiment_engine
from tff_pdp.lock import only_writer
from tff_pdp.registry.entries import Registry
from tff_pdp.training import spending
from tff_pdp.training import train as training
from tff_pdp.training.counted import cost_of_all_runs, planned_ledger, settle
from tff_pdp.training.evaluate import evaluate_experiment
from tff_pdp.training.record.charges import read_charges
from tff_pdp.training.record.releases import set_aside
from tff_pdp.training.record.sealing import seal_run
from tff_pdp.training.rounds import run_round
from tff_pdp.training.spending import Choices
from tff_pdp.training.train import train
from tff_pdp.verification.experiment import verify
from tff_pdp.verification.run_folder import Status

ROOMY = {**ONE, "privacy__noise_multiplier": 8.0, "training__rounds": 6}


class Stepped:
    """A training whose rounds are run one at a time, beside those of others."""

    def __init__(self, config, engine, *, resume=False):
        self.config, self.method = config, build_method(config, NAME)
        self.folder = config.algorithm_folder(NAME)
        self.stack = contextlib.ExitStack()
        self.state, self.spending = training._start_or_resume(
            config, self.method, self.folder, engine, resume, self.stack
        )
        self.data = self.method.round_data("train")

    def reserve(self):
        self.spending.before_round(self.state.round_number + 1)

    def step(self):
        self.reserve()
        self.run()

    def run(self):
        self.state = run_round(self.method, self.state, self.state.round_number + 1, self.data)
        training.save(self.folder, self.state)

    def stop(self):
        self.stack.close()

    def end(self):
        self.spending.end(self.state)
        self.stop()
        settle(self.config, self.folder)


@pytest.fixture
def start(experiment, engines_by_hand):
    """A function that begins a training, or goes on with one."""

    def begin(name, *, resume=False, **overrides):
        return Stepped(experiment(name, **{**ROOMY, **overrides}), engines_by_hand, resume=resume)

    return begin


@pytest.fixture
def engines_by_hand(experiment):
    with experiment_engine(experiment("engine", **ROOMY)) as engine:
        yield engine


@pytest.fixture
def copy(tmp_path):
    """A function that copies an experiment's folder."""

    def made(one, other):
        shutil.copytree(tmp_path / one, tmp_path / other, symlinks=True)

    return made


@contextlib.contextmanager
def other_machine(name="another"):
    own = spending.arithmetic_of
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spending, "arithmetic_of", lambda *given, **named: {**own(*given, **named), "processor": name})
        yield


def truth(*configs):
    return max(by_hand(*configs, silo=silo) for silo in ("silo_00", "silo_01", "silo_02"))


def stated(config):
    return cost_of_all_runs(config, build_method(config, NAME)).worst.epsilon


def test_of_two_copies_that_are_drawn_from_otherwise_one_goes_on(start, copy):
    one = start("one")
    one.step()
    one.step()
    one.reserve()
    copy("one", "other")
    with other_machine():
        other = start("other", resume=True)
    one.run()
    # The copy has drawn anew from round 3 on: the first may go on no more, however far it has come.
    with pytest.raises(DataError, match="was continued"):
        one.step()
    for _ in range(4):
        other.step()
    with pytest.raises(DataError, match="was continued"):
        one.step()
    other.end()
    assert other.state.round_number == 6
    # Three rounds of the first, of which two are in the copy's record as well, and the copy's four. The first has
    # reserved a round besides that it was refused: nobody can tell that nothing was drawn of it.
    assert stated(other.config) > truth(other.config)
    shutil.rmtree(one.folder)
    assert stated(other.config) == pytest.approx(truth(other.config), rel=1e-9)
    counts = [one.count for one in read_charges(other.folder).ledger.entries if one.scope == "silo_00"]
    assert sum(counts) >= 3 + 4


def test_a_copy_that_was_refused_is_refused_the_second_time(start, copy):
    one = start("one")
    one.step()
    one.step()
    copy("one", "other")
    with other_machine():
        other = start("other", resume=True)
    one.step()
    with pytest.raises(DataError, match="was continued"):
        other.step()
    other.stop()
    # Its own record has the line now, which was not acted upon.
    assert read_charges(other.folder).through_round == read_charges(one.folder).through_round
    with other_machine(), pytest.raises(DataError, match="was continued"):
        start("other", resume=True)
    one.step()


def test_a_run_whose_reservation_the_registry_was_not_told_does_not_go_on_beside_its_copy(start, copy, monkeypatch):
    one = start("one")
    one.step()
    one.step()
    copy("one", "other")
    with monkeypatch.context() as patch:

        def full(*_):
            raise OSError("no room")

        patch.setattr(Registry, "reserve", full)
        with pytest.raises(OSError):
            one.step()
    one.stop()
    with other_machine():
        other = start("other", resume=True)
    other.step()
    with pytest.raises(DataError, match="was continued"):
        start("one", resume=True)


def test_copies_that_do_the_same_go_on(start, copy):
    """They have the same bits: what the second releases is known."""
    one = start("one")
    one.step()
    one.step()
    copy("one", "other")
    other = start("other", resume=True)
    one.step()
    other.step()
    one.end()


def test_a_run_that_goes_on_after_a_copy_was_replaced_counts_to_its_end(start, copy, experiment, tmp_path):
    one = start("one")
    one.reserve()
    copy("one", "other")
    other = experiment("other", **{**ROOMY, "training__rounds": 1})
    train(other, NAME, overwrite=True, progress=False)
    one.run()
    for _ in range(4):
        one.step()
    one.stop()
    both = truth(one.config, other)
    assert truth(other) < both
    # The copy's folder knows less of the run than the run's own.
    assert stated(other) == pytest.approx(both, rel=1e-9)
    third = experiment("third", **{**ROOMY, "training__rounds": 1})
    assert stated(third) == pytest.approx(both, rel=1e-9)
    (tmp_path / "one").rename(tmp_path / "moved")
    assert stated(third) > both, "all that was planned"


def test_a_run_whose_copy_was_replaced_before_the_first_round_counts(start, copy, experiment, tmp_path):
    one = start("one")
    copy("one", "other")
    other = experiment("other", **{**ROOMY, "training__rounds": 1})
    train(other, NAME, overwrite=True, progress=False)
    one.step()
    one.stop()
    (tmp_path / "one").rename(tmp_path / "moved")
    assert stated(other) > 1.5 * truth(other)


def test_a_link_to_a_runs_folder_has_the_lock_of_that_folder(start, experiment):
    one = start("one")
    config = experiment("other", **ROOMY)
    config.algorithm_folder(NAME).symlink_to(one.folder)
    with only_writer(one.folder), pytest.raises(DataError, match=r"process \d+ writes to "):
        train(config, NAME, overwrite=True, progress=False)


def test_a_run_is_not_replaced_through_a_link(start, experiment):
    one = start("one")
    one.step()
    one.stop()
    before = {path: path.read_bytes() for path in one.folder.rglob("*") if path.is_file()}
    config = experiment("other", **ROOMY)
    link = config.algorithm_folder(NAME)
    link.symlink_to(one.folder)
    with pytest.raises(ConfigError, match=f"^{link} is a link to {one.folder}: "):
        train(config, NAME, overwrite=True, progress=False)
    assert link.is_symlink()
    assert {path: path.read_bytes() for path in one.folder.rglob("*") if path.is_file()} == before
    # Nor does a run go on there, whose checkpoints know what lies beside its own folder.
    with pytest.raises(ConfigError, match=f"^{link} is a link to {one.folder}: "):
        train(config, NAME, resume=True, progress=False)


def test_what_is_planned_never_falls_where_two_copies_draw_anew_at_once(start, copy):
    """The one that is told second has come further, and would draw fewer rounds anew."""
    longer = {"training__rounds": 200, "privacy__noise_multiplier": 40.0, "training__checkpoint_every": 1}
    one = start("one", **longer)
    one.reserve()
    copy("one", "other")
    one.run()
    one.run()
    one.stop()
    own, refused = Registry.reserve, []

    def between(self, run_id, chains):
        if not refused:
            refused.append(True)
            with other_machine("third"), pytest.raises(DataError, match="was continued"):
                start("one", resume=True, **longer)
        return own(self, run_id, chains)

    with pytest.MonkeyPatch.context() as patch, other_machine():
        patch.setattr(Registry, "reserve", between)
        other = start("other", resume=True, **longer)
    assert refused
    entry = Registry().find(read_charges(other.folder).run_id)
    assert entry.planned.ledger.to_json() == planned_ledger(other.method.plan, other.state).to_json()
    other.step()
    other.stop()


def test_a_registry_of_an_earlier_version_is_read_and_counts(start, experiment, tmp_path):
    """It knows of a run how many lines its record had, and not which."""
    one = start("one")
    one.step()
    shutil.copytree(one.folder, tmp_path / "older")
    one.step()
    registry, lines, num_lines = Registry(), [], len(read_charges(one.folder).chains)
    for line in journal.read(registry.path).lines:
        head = {"reached": [num_lines, 2]} if "head" in line else {}
        lines.append({**{name: value for name, value in line.items() if name != "head"}, **head})
    journal.write(registry.path, lines)
    two = experiment("two", **{**ROOMY, "training__rounds": 1})
    train(two, NAME, progress=False)
    assert stated(two) == pytest.approx(truth(one.config, two), rel=1e-9)
    one.stop()
    one.folder.rename(tmp_path / "newest")
    (tmp_path / "older").rename(one.folder)
    assert stated(two) > truth(one.config, two), "all that was planned"
    with pytest.raises(DataError, match="was continued"):
        start("one", resume=True)
    shutil.rmtree(one.folder)
    (tmp_path / "newest").rename(one.folder)
    one = start("one", resume=True)
    for _ in range(4):
        one.step()
    one.end()
    assert stated(two) == pytest.approx(truth(one.config, two), rel=1e-9)


def test_an_older_copy_in_the_experiments_folder_is_told_and_hides_nothing(start):
    one = start("one")
    one.step()
    older = one.folder.with_name("zzz_older")
    shutil.copytree(one.folder, older)
    for _ in range(5):
        one.step()
    one.end()
    findings = list(verify(one.folder.parent))
    (problem,) = [finding for finding in findings if finding.status is Status.PROBLEM]
    assert (problem.path, "a copy of the run in" in problem.text) == (older, True)
    (together,) = [finding.text for finding in findings if "together" in finding.text]
    assert f"epsilon at most {truth(one.config):.6g}" in together
    shutil.rmtree(Registry().folder)
    assert stated(one.config) == pytest.approx(truth(one.config), rel=1e-9)


def test_an_older_copy_does_not_hide_what_a_replaced_run_has_spent(start, tmp_path):
    """Rounds that were drawn anew cost more, whatever their numbers."""
    one = start("one")
    one.step()
    one.reserve()
    one.stop()
    shutil.copytree(one.folder, tmp_path / "backup")
    with other_machine():
        one = start("one", resume=True)
    one.step()
    one.stop()
    spent = truth(one.config)
    settle(one.config, one.folder)
    set_aside(one.folder.parent, one.folder)
    shutil.copytree(tmp_path / "backup", one.folder)
    assert truth(one.config) < spent
    assert stated(one.config) == pytest.approx(spent, rel=1e-9)
    # Without the registry, nobody knows that the copy has nothing more.
    findings = [finding.text for finding in verify(one.folder.parent) if "together" in finding.text]
    shutil.rmtree(Registry().folder)
    assert stated(one.config) >= spent
    assert float(findings[0].partition("at most ")[2].split()[0]) >= spent - 1e-5


def test_a_copy_that_went_on_under_another_registry_counts_beside_the_run(start, copy, monkeypatch, tmp_path):
    one = start("one")
    one.step()
    one.step()
    one.stop()
    copy("one", "other")
    shutil.copytree(Registry().folder, tmp_path / "elsewhere" / "tff_pdp" / "registry")
    with monkeypatch.context() as patch, other_machine():
        patch.setenv("XDG_STATE_HOME", str(tmp_path / "elsewhere"))
        other = start("other", resume=True)
        for _ in range(4):
            other.step()
        other.end()
    one = start("one", resume=True)
    one.step()
    one.stop()
    settle(one.config, one.folder)
    set_aside(one.folder.parent, one.folder)
    assert stated(other.config) > truth(other.config)


def test_a_run_whose_registry_was_removed_meanwhile_does_not_go_on_unseen(start, capsys):
    one = start("one")
    one.step()
    shutil.rmtree(Registry().folder)
    with pytest.raises(DataError, match="has no entry of the run that is about to continue"):
        one.step()
    one.stop()
    one = start("one", resume=True)
    assert "does not have this run, which was started under another registry" in capsys.readouterr().err
    one.step()
    assert Registry().find(read_charges(one.folder).run_id) is not None


def test_copies_that_compute_clients_in_other_ways_are_copies_that_differ(start, copy):
    """What `client_parallelism: auto` has chosen is on record before its first result is used."""
    one = start("one")
    copy("one", "other")
    other = start("other", resume=True)
    for stepped in (one, other):
        stepped.reserve()
    one.spending.choose({"a computation": "loop"})
    with pytest.raises(DataError, match="was continued"):
        other.spending.choose({"a computation": "vectorized"})
    one.step()
    assert read_charges(one.folder).choices == {"a computation": "loop"}
    assert Choices(one.folder) == {"a computation": "loop"}


def test_a_run_with_noised_numbers_of_examples_counts_with_its_budget_for_others_too(experiment):
    """Other numbers would have chosen other noise, and what was spent says nothing of that."""
    noised = {"privacy__num_examples": {"kind": "noised", "epsilon": 0.5}, "privacy__noise_multiplier": 20.0}
    one = experiment(
        "one", **{**ROOMY, **noised, "privacy__budgets": {"kind": "one_for_all", "epsilon": 8.0, "delta": 1e-4}}
    )
    two = experiment("two", **{**ROOMY, "privacy__noise_multiplier": 20.0})
    for config in (one, two):
        train(config, NAME, progress=False)
    expected = 8.0 + truth(two)
    for config in (one, two):
        assert stated(config) == pytest.approx(expected, rel=1e-9)


@pytest.fixture
def fork(start, copy, monkeypatch, tmp_path):
    """Forks a run `one` after two rounds into itself and a copy `other`; both go on to their ends.

    The one named goes on under another registry, on another machine.
    """

    def go_on(name):
        run = start(name, resume=True)
        for _ in range(4):
            run.step()
        run.end()
        return run

    def fork_run(elsewhere):
        one = start("one")
        one.step()
        one.step()
        one.stop()
        copy("one", "other")
        shutil.copytree(Registry().folder, tmp_path / "elsewhere" / "tff_pdp" / "registry")
        with monkeypatch.context() as patch, other_machine():
            patch.setenv("XDG_STATE_HOME", str(tmp_path / "elsewhere"))
            gone = go_on(elsewhere)
        (here,) = {"one", "other"} - {elsewhere}
        with other_machine("third"):
            stayed = go_on(here)
        return (gone, stayed) if elsewhere == "one" else (stayed, gone)

    return fork_run


@pytest.fixture
def forks(fork):
    """A run, and its copy that went on to its end under another registry, on another machine."""
    return fork("other")


def replace(run):
    settle(run.config, run.folder)
    set_aside(run.folder.parent, run.folder)


def test_forks_that_are_replaced_in_turn_all_count(forks):
    one, other = forks
    alone = truth(one.config)
    replace(one)
    shutil.copytree(other.folder, one.folder)
    both = stated(one.config)
    assert both > 1.2 * alone
    replace(one)
    assert stated(one.config) == pytest.approx(both, rel=1e-9)
    together = [finding.text for finding in verify(one.folder.parent) if "together" in finding.text]
    assert any(f"{both:.6g}"[:5] in text for text in together), together


def test_a_fork_in_the_runs_own_folder_counts_for_others_too(forks, experiment, tmp_path):
    one, other = forks
    third = experiment("third", **{**ROOMY, "training__rounds": 1})
    train(third, NAME, progress=False)
    before = stated(third)
    shutil.rmtree(one.folder)
    shutil.copytree(other.folder, one.folder)
    after = stated(third)
    assert after > before
    assert after == pytest.approx(stated(one.config), rel=1e-9)


def test_a_finished_copy_says_what_its_run_has_drawn_anew_elsewhere(start, copy, experiment):
    one = start("one")
    for _ in range(6):
        one.step()
    one.end()
    copy("one", "other")
    shutil.rmtree(sorted((one.folder / "checkpoints").glob("round_*"))[-1])
    with other_machine():
        train(one.config, NAME, resume=True, progress=False)
    other = experiment("other", **ROOMY)
    summary = evaluate_experiment(other)
    composed = summary["privacy"]["composed"]
    assert composed["methods"] == 1
    assert composed["epsilon"] > max(silo["epsilon_spent"] for silo in summary["silos"])
    page = (other.clients_folder.parent / "report.html").read_text()
    assert "nothing is added" not in page
    assert "A copy of it has drawn rounds anew elsewhere" in page


def test_what_the_runs_own_folder_has_done_counts_for_whoever_has_a_copy(fork, experiment):
    one, other = fork("one")
    third = experiment("third", **{**ROOMY, "training__rounds": 1})
    both = stated(third)
    assert both > 1.2 * truth(other.config)
    for config in (one.config, other.config):
        assert stated(config) == pytest.approx(both, rel=1e-9)
    # `--overwrite` takes nothing back.
    replace(one)
    for config in (third, one.config, other.config):
        assert stated(config) >= both * (1 - 1e-9)


def test_a_fork_that_is_evaluated_or_replaced_here_counts_for_others_from_then_on(forks, experiment):
    _, other = forks
    third = experiment("third", **{**ROOMY, "training__rounds": 1})
    before, both = stated(third), stated(other.config)
    assert before < both, "nothing here knows of the copy"
    evaluate_experiment(experiment("other", **ROOMY))
    for _ in range(2):
        assert stated(third) == pytest.approx(both, rel=1e-9)
        assert stated(other.config) == pytest.approx(both, rel=1e-9), "counted once"
        # The second time without the folder.
        replace(other)


def test_a_restored_backup_lowers_nothing_of_a_registry_of_an_earlier_version(start, experiment, tmp_path):
    one = start("one")
    for _ in range(6):
        one.step()
    one.end()
    shutil.copytree(one.folder, tmp_path / "backup")
    shutil.rmtree(sorted((one.folder / "checkpoints").glob("round_*"))[-1])
    with other_machine():
        train(one.config, NAME, resume=True, progress=False)
    spent = truth(one.config)
    registry = Registry()
    journal.write(
        registry.path,
        [{key: value for key, value in line.items() if key != "head"} for line in journal.read(registry.path).lines],
    )
    shutil.rmtree(one.folder)
    shutil.copytree(tmp_path / "backup", one.folder)
    third = experiment("third", **{**ROOMY, "training__rounds": 1})
    assert truth(one.config) < spent
    assert stated(third) > spent, "whether the backup went on in another way is not known"
    with pytest.raises(DataError, match="was continued"):
        train(experiment("one", **ROOMY), NAME, resume=True, progress=False)
    settle(one.config, one.folder)
    shutil.rmtree(one.folder)
    assert stated(third) == pytest.approx(spent, rel=1e-9)


def test_of_two_copies_that_a_new_registry_meets_at_once_the_larger_plan_is_entered(start, copy, monkeypatch, tmp_path):
    one = start("one")
    one.step()
    one.step()
    copy("one", "other")
    for _ in range(3):
        one.step()
    one.stop()
    with monkeypatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path / "elsewhere"))
        other = start("other", resume=True)
        for _ in range(3):
            other.step()
        other.stop()
    # The copy will have to draw a round anew.
    shutil.rmtree(sorted((other.folder / "checkpoints").glob("round_*"))[-1])
    shutil.rmtree(Registry().folder)
    own, met = Registry.keep_dataset, []

    def between(self, *arguments):
        name = own(self, *arguments)
        if not met:
            met.append(True)
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(Registry, "reserve", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
                start("one", resume=True)
        return name

    with monkeypatch.context() as patch, other_machine():
        patch.setattr(Registry, "keep_dataset", between)
        other = start("other", resume=True)
    assert met
    entry = Registry().find(read_charges(other.folder).run_id)
    assert entry.planned.ledger.to_json() == planned_ledger(other.method.plan, other.state).to_json()
    other.stop()


def test_a_backup_that_was_replaced_after_its_run_counts_once_for_verify_too(start, experiment, tmp_path):
    one = start("one")
    for _ in range(3):
        one.step()
    shutil.copytree(one.folder, tmp_path / "backup")
    for _ in range(3):
        one.step()
    one.end()
    replace(one)
    shutil.copytree(tmp_path / "backup", one.folder)
    config = experiment("one", **ROOMY)
    train(config, NAME, overwrite=True, progress=False)
    evaluate_experiment(config)
    assert [finding.text for finding in verify(one.folder.parent) if finding.status is Status.PROBLEM] == []


def test_noised_numbers_without_budgets_have_no_bound_for_that_reason(experiment):
    noised = {"privacy__num_examples": {"kind": "noised", "epsilon": 0.5}, "privacy__noise_multiplier": 20.0}
    config = experiment(
        "one",
        **{**ROOMY, **noised, "privacy__budgets": {"kind": "one_for_all", "epsilon": float("inf"), "delta": 1e-4}},
    )
    train(config, NAME, progress=False)
    summary = evaluate_experiment(config)
    assert summary["privacy"]["claim"] == "none"
    assert "have no budget, which alone would hold with noised numbers" in summary["privacy"]["claim_reason"]
    texts = [finding.text for finding in verify(config.clients_folder.parent)]
    assert any("no bound, as scopes are without noise, or without a budget: 3 of 3" in text for text in texts)
    assert not any("inf" in text.split() for text in texts)


def test_statistics_of_an_earlier_version_under_another_registry_are_not_said_to_count(
    experiment, monkeypatch, tmp_path
):
    config = experiment("one", **{**ROOMY, "privacy__num_examples": {"kind": "noised", "epsilon": 0.5}})
    train(config, NAME, progress=False)
    path = config.clients_folder.parent / "silo_releases.json"
    content = json.loads(path.read_text())
    write_json(path, {name: value for name, value in content.items() if name not in ("registry_key", "digest")})
    shutil.rmtree(config.algorithm_folder(NAME))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "elsewhere"))
    with pytest.raises(ConfigError, match=r"in another registry than .*, name that registry, which counts them"):
        train(config, NAME, progress=False)


def test_a_sealed_copy_counts_once(start, copy, experiment):
    """Counts alike for a copy of the run or of a beginning of it, whichever of both is sealed and replaced."""
    one = start("one")
    one.step()
    one.step()
    copy("one", "older")
    for _ in range(4):
        one.step()
    one.end()
    copy("one", "other")
    older, other = experiment("older", **ROOMY), experiment("other", **ROOMY)
    third = experiment("third", **{**ROOMY, "training__rounds": 1})
    spent = truth(one.config)
    seal_run(older.algorithm_folder(NAME), 6, is_unfinished_too=True)
    seal_run(one.folder, 6)
    for config in (older, other, one.config, third):
        assert stated(config) == pytest.approx(spent, rel=1e-9)
    for config in (older, other):
        settle(config, config.algorithm_folder(NAME))
        set_aside(config.clients_folder.parent, config.algorithm_folder(NAME))
        assert stated(third) == pytest.approx(spent, rel=1e-9)


def test_a_fork_that_is_evaluated_and_then_sealed_counts_once(forks, experiment):
    _, other = forks
    both = stated(other.config)
    evaluate_experiment(experiment("other", **ROOMY))
    seal_run(other.folder, 6)
    third = experiment("third", **{**ROOMY, "training__rounds": 1})
    for _ in range(2):
        assert stated(third) == pytest.approx(both, rel=1e-9)
        assert stated(other.config) == pytest.approx(both, rel=1e-9)
        replace(other)


def test_a_run_that_goes_on_while_runs_are_added_up_counts_once(start, monkeypatch):
    one = start("one")
    one.step()
    own = Registry.entries

    def between(self):
        entries = own(self)
        one.reserve()
        return entries

    with monkeypatch.context() as patch:
        patch.setattr(Registry, "entries", between)
        during = stated(one.config)
    assert during == pytest.approx(truth(one.config), rel=1e-9)
    one.stop()
