"""How far a training has come, in lines and as a bar."""

import io
import re
import sys

import pytest
import tqdm.std

from tests.training.stopping import stop_before
from tff_pdp.trackers.base import RoundReport
from tff_pdp.training import progress
from tff_pdp.training import train as training
from tff_pdp.training.progress import Progress
from tff_pdp.training.train import train

_STAMP = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", re.MULTILINE)


def lines_of(text):
    """The lines of a log, without the times that they begin with."""
    assert len(_STAMP.findall(text)) == len(text.splitlines())
    return _STAMP.sub("", text).splitlines()


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test sets."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_lines_leave_out_the_first_round_from_rates_and_come_every_ten_seconds(tmp_path, clock):
    log = tmp_path / "train.log"
    report = RoundReport(1, 1.0, 1.2345, 1e-5, {}, "mean_squared_error", False, {"mean": 0.25})
    with Progress("mr_mtl", 0, 6, is_shown=False, log_file=log) as shown:
        # Thirty seconds of tracing, and then four seconds for each round.
        for number, seconds in enumerate((30, 4, 4, 4, 4, 4), start=1):
            clock[0] += seconds
            shown.round_done(number, "", report if number == 1 else None)
    known = ", epsilon at most 1.24, validation mean squared error 0.25 (not private)"
    assert lines_of(log.read_text()) == [
        f"mr_mtl: round 1 of 6{known}",
        f"mr_mtl: round 4 of 6, 4 s a round, 0:00:08 left{known}",
        f"mr_mtl: round 6 of 6, 4 s a round, 0:00:00 left{known}",
    ]


def test_a_log_file_is_added_to_and_has_warnings_and_the_end(tmp_path, clock, capfd):
    log = tmp_path / "train.log"
    log.write_text("")
    with pytest.raises(RuntimeError), Progress("a", 3, 9, is_shown=False, log_file=log) as shown:
        shown.warn("loud noise")
        shown.round_done(4, "", None)
        raise RuntimeError
    with Progress("b", 0, 9, is_shown=False, log_file=log):
        pass
    assert lines_of(log.read_text()) == [
        "a: warning: loud noise",
        "a: round 4 of 9",
        "a: stopped in round 5 of 9",
    ]
    assert capfd.readouterr().err == "a: warning: loud noise\n"


def test_where_no_bar_can_be_drawn_there_are_lines_and_no_carriage_returns(capfd, clock):
    with Progress("mr_mtl", 0, 2) as shown:
        shown.round_done(1, "", None)
        shown.round_done(2, "", None)
    text = capfd.readouterr().err
    assert "\r" not in text
    assert lines_of(text) == ["mr_mtl: round 1 of 2", "mr_mtl: round 2 of 2, 0 s a round, 0:00:00 left"]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_the_rate_of_a_bar_begins_after_the_first_round(monkeypatch):
    now = [100.0]
    for module in (progress.time, tqdm.std):
        monkeypatch.setattr(module, "time", lambda: now[0])
    monkeypatch.setattr(sys, "stderr", Terminal())
    with Progress("mr_mtl", 2, 100) as shown:
        now[0] += 50
        shown.round_done(3, "", None)
        for number in (4, 5):
            now[0] += 2
            shown.round_done(number, "", None)
        figures = shown._bar.format_dict
        assert (figures["n"], figures["initial"], figures["total"]) == (5, 3, 100)
        assert figures["elapsed"] == 4
        # A round in two seconds, however long the first one took.
        assert figures["rate"] is None or figures["rate"] == pytest.approx(0.5)
    assert "3%" in sys.stderr.getvalue() or "5%" in sys.stderr.getvalue()


def test_a_stop_says_the_round_and_how_many_rounds_are_kept(experiment, monkeypatch, tmp_path):
    def stop(method, state, number, data, real=training.run_round):
        if number == 5:
            raise KeyboardInterrupt
        return real(method, state, number, data)

    monkeypatch.setattr(training, "run_round", stop)
    log = tmp_path / "train.log"
    with pytest.raises(KeyboardInterrupt, match=r"^local_only: in round 5 of 6; 4 rounds are kept$"):
        train(experiment(), "local_only", progress=False, log_file=log)
    assert lines_of(log.read_text())[-1] == "local_only: stopped in round 5 of 6"


def test_quiet_writes_nothing_to_standard_error(experiment, monkeypatch, capfd):
    stop_before(monkeypatch, 4)
    with pytest.raises(RuntimeError):
        train(experiment(), "local_only", progress=False)
    assert capfd.readouterr().err == ""
