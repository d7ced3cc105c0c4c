"""Damaged files of runs, by the project's readers in this process: refused by name, or without any effect."""

import collections
import random
import shutil

import pytest

from tests.tiers import amount
from tests.training.record.damages import Damage
from tests.training.record.whole_runs import KINDS, MEANT_TO_BE_CHANGED, files_of, kind_of, readers_of
from tff_pdp.errors import UserError

pytestmark = pytest.mark.timeout(900)
READ = [kind for kind, readers in KINDS.items() if readers]


@pytest.fixture(scope="module")
def by_kind(whole_runs):
    """The files of all runs, by their kind: pairs of a run and a name."""
    found = collections.defaultdict(list)
    for run in whole_runs.values():
        for name in files_of(run):
            found[kind_of(name)].append((run, name))
    return found


@pytest.fixture(scope="module")
def expected(whole_runs, tmp_path_factory):
    """A function: what a reader returns of a run that nothing has happened to."""
    known = {}

    def look_up(run, reader):
        if (run.name, reader) not in known:
            copy = run.copied_to(tmp_path_factory.mktemp("whole") / "run")
            known[run.name, reader] = reader(copy)
            shutil.rmtree(copy.output)
        return known[run.name, reader]

    return look_up


def test_every_kind_of_file_is_there_and_no_file_is_of_another(by_kind):
    assert set(by_kind) | {r"clients/dead_letters/.*"} == set(KINDS)


def outcome_of(reader, run, name, expected):
    """Refused by name, without effect, or what went wrong."""
    try:
        found = reader(run)
    except UserError as error:
        is_named = name.rpartition("/")[2] in str(error) and "\n" not in str(error)
        return "refused" if is_named else f"refused as {error}"
    except Exception as error:
        return f"a traceback: {type(error).__name__}: {error}"
    return "without effect" if found == expected or kind_of(name) == MEANT_TO_BE_CHANGED else "other results"


@pytest.mark.parametrize("kind", READ)
def test_a_damaged_file_is_refused_by_name_or_without_effect(by_kind, expected, tmp_path, kind):
    outcomes = collections.Counter()
    wrong = []
    for number in range(amount(test=6, all=-(-1_000 // len(READ)))):
        run, name = random.Random(f"{kind} {number}").choice(by_kind[kind])
        damage = Damage.draw(run.output / name, f"{kind} {number}")
        found = []
        for reader in readers_of(run, name):
            copy = run.copied_to(tmp_path / "damaged")
            damage.inflict(copy.output / name)
            found.append(outcome_of(reader, copy, name, expected(run, reader)))
            if found[-1] not in ("refused", "without effect"):
                wrong.append(f"{run.name}, {name}, {damage.about}, {reader.__name__}: {found[-1]}")
            shutil.rmtree(copy.output)
        outcomes["refused" if "refused" in found else "without effect"] += 1
    print(f"{kind}: {dict(outcomes)}")
    assert wrong == []
    # Each kind is looked at, whatever the readers make of single bytes.
    assert outcomes["refused"]
