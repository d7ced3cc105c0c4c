"""Results of accountants on disk: found again, worked out anew where they are damaged, and shared among processes."""

import functools
import os
import subprocess
import sys

import pytest

from tests.places import ROOT
from tff_pdp.privacy.accounting import kept as kept_module
from tff_pdp.privacy.accounting.accountants import EpsilonBounds, calibrate_noise_multiplier, epsilon_bounds
from tff_pdp.privacy.accounting.events import poisson_gaussian_event
from tff_pdp.privacy.accounting.kept import kept, side_by_side, worked_out_anew


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setattr(kept_module, "folder", lambda: tmp_path / "results")
    return tmp_path / "results"


def build(calls):
    """A function whose results are kept, as by a process of its own."""

    @kept(float, float)
    def halve(number, of):
        calls.append(number)
        return number / 2

    return halve


def entries(place):
    return sorted(path for path in place.rglob("*") if path.is_file())


def test_a_later_process_finds_what_was_worked_out(place):
    calls = []
    assert [build(calls)(0.1, "x"), build(calls)(0.1, "x"), build(calls)(float("inf"), "x")] == [
        0.05,
        0.05,
        float("inf"),
    ]
    assert calls == [0.1, float("inf")] and len(entries(place)) == 2


def test_a_result_is_for_its_arguments_alone(place):
    calls = []
    halve = build(calls)
    assert [halve(1.0, "x"), halve(1.0, "y"), halve(1.0 + 2**-52, "x")] == [0.5, 0.5, 0.5 + 2**-53]
    assert len(calls) == 3


@pytest.mark.parametrize("damage", ["byte", "cut", "empty", "moved"])
def test_what_is_damaged_is_worked_out_anew(place, damage):
    calls = []
    build(calls)(1.0, "x")
    (path,) = entries(place)
    content = path.read_bytes()
    if damage == "moved":
        build(calls)(3.0, "x")
        (other,) = set(entries(place)) - {path}
        other.replace(path)
    else:
        changed = {"byte": content.replace(b"0.5", b"0.4"), "cut": content[: len(content) // 2], "empty": b""}
        path.write_bytes(changed[damage])
    del calls[:]
    assert build(calls)(1.0, "x") == 0.5 and calls == [1.0]
    # And is whole again.
    assert build(calls)(1.0, "x") == 0.5 and calls == [1.0]
    assert path.read_bytes() == content


def test_every_byte_counts(place):
    calls = []
    build(calls)(0.75, "x")
    (path,) = entries(place)
    content = path.read_bytes()
    for position in range(len(content)):
        path.write_bytes(content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :])
        assert build(calls)(0.75, "x") == 0.375


def test_works_where_nothing_can_be_written(place):
    place.write_text("no folder")
    calls = []
    assert [build(calls)(1.0, "x") for _ in range(2)] == [0.5, 0.5] and len(calls) == 2


def test_worked_out_anew_reads_and_leaves_nothing(place):
    calls = []
    build(calls)(1.0, "x")
    entries(place)[0].write_bytes(b"damaged")
    with worked_out_anew():
        assert build(calls)(1.0, "x") == 0.5 and build(calls)(3.0, "x") == 1.5
    assert len(entries(place)) == 1 and entries(place)[0].read_bytes() == b"damaged"


def test_epsilon_is_the_same_from_disk(place):
    found = epsilon_bounds(poisson_gaussian_event(0.01, 1.0, 1000), 1e-5)
    command = (
        "from tff_pdp.privacy.accounting.accountants import epsilon_bounds, EpsilonBounds;"
        "from tff_pdp.privacy.accounting.events import poisson_gaussian_event;"
        "print(repr(epsilon_bounds(poisson_gaussian_event(0.01, 1.0, 1000), 1e-5)))"
    )
    environment = {**os.environ, "XDG_CACHE_HOME": str(place)}
    printed = [
        subprocess.run(
            [sys.executable, "-c", command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
        ).stdout
        for _ in range(2)
    ]
    assert entries(place)
    assert [eval(text, {"EpsilonBounds": EpsilonBounds}) for text in printed] == [found, found]


BUDGETS = [1.0, 2.0, 3.0, 4.0, 5.0]


def test_calls_are_shared_among_processes_and_results_are_in_order(monkeypatch):
    calls = [functools.partial(calibrate_noise_multiplier, epsilon, 1e-4, 0.125, 30) for epsilon in BUDGETS]
    with worked_out_anew():
        expected = side_by_side(calls)
    started, start = [], kept_module._started
    monkeypatch.setattr(kept_module, "_SECONDS_TO_START", 0.0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    monkeypatch.setattr(kept_module, "_started", lambda given: started.append(len(given)) or start(given))
    assert side_by_side(calls) == expected and started == [2]
    assert expected == sorted(expected, reverse=True)


def refuse(number):
    raise ValueError(f"no {number}")


def test_raises_what_the_first_call_to_fail_raises(monkeypatch):
    monkeypatch.setattr(kept_module, "_SECONDS_TO_START", 0.0)
    calls = [functools.partial(float, 1), functools.partial(refuse, 2), functools.partial(refuse, 3)]
    with pytest.raises(ValueError, match="no 2"):
        side_by_side(calls)
    assert side_by_side([]) == []


def test_calls_that_other_processes_cannot_make_are_made_in_this_one(monkeypatch):
    monkeypatch.setattr(kept_module, "_SECONDS_TO_START", 0.0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    assert side_by_side([lambda number=number: 2 * number for number in range(5)]) == [0, 2, 4, 6, 8]
