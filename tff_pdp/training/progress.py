"""Shows how far a training has come: as a bar on a terminal, as lines in a log, or not at all.

The first round of a command takes longer than later ones, because computations are traced and compiled. Rates and
remaining times leave the first round out.
"""

import datetime
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

from tqdm.auto import tqdm

from tff_pdp.files import naming
from tff_pdp.reports.words import plain, upper
from tff_pdp.trackers.base import RoundReport

# From one line to the next, in a log.
_SECONDS_BETWEEN_LINES = 10.0


class Progress:
    """Shows the rounds of one method; a context manager around the rounds.

    On a terminal and in a notebook there is a bar on standard error. If standard error is a file or a pipe, a line is
    written every ten seconds instead. A log file gets the same lines.

    Attributes:
      reached: number of rounds that are done.
      total: number of planned rounds.
    """

    def __init__(self, name: str, done: int, total: int, *, is_shown: bool = True, log_file: Path | None = None):
        """Opens the log file for appending, and shows nothing yet.

        Args:
          name: name of the method.
          done: number of rounds that are done already.
          total: number of planned rounds.
          is_shown: whether to write to standard error; warnings are written there in any case.
          log_file: file that lines are added to; None for no file.

        Raises:
          OSError: the log file cannot be opened.
        """
        self._name, self.total, self.reached, self._first = name, total, done, done + 1
        has_bar = is_shown and _can_draw()
        self._bar = tqdm(None, name, total, initial=done, unit="round", disable=not has_bar, dynamic_ncols=True)
        self._outputs: list[TextIO] = [sys.stderr] if is_shown and not has_bar else []
        self._log: TextIO | None = None
        if log_file is not None:
            with naming(log_file):
                self._log = open(log_file, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 - closed at exit
            self._outputs.append(self._log)
        # From the end of the first round on.
        self._timed_from = self._last_line = time.monotonic()
        self._known = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._write(f"stopped in round {self.reached + 1} of {self.total}")
        self._bar.close()
        if self._log is not None:
            self._log.close()

    def round_done(self, round_number: int, condition: str, report: RoundReport | None) -> None:
        """Shows a round that is done.

        Args:
          round_number: number of the round.
          condition: words on how the engine computes; empty for none.
          report: figures of the round; None if the round was not validated.
        """
        now, self.reached = time.monotonic(), round_number
        if report is not None:
            self._known = _figures(report)
        self._bar.set_postfix_str(condition, refresh=False)
        is_first = round_number == self._first
        if is_first:
            self._timed_from = now
            self._begin_rate()
        else:
            self._bar.update(1)
        if is_first or round_number == self.total or now - self._last_line >= _SECONDS_BETWEEN_LINES:
            self._last_line = now
            self._write(f"round {round_number} of {self.total}{self._times(now)}{self._known}")

    def warn(self, text: str) -> None:
        """Writes a warning to standard error, also where nothing else is shown, and to the log file."""
        tqdm.write(f"{self._name}: warning: {text}", file=sys.stderr)
        if self._log is not None:
            self._log.write(f"{_now()} {self._name}: warning: {text}\n")

    def _begin_rate(self) -> None:
        """Counts the first round as done, and begins to measure the rate of the bar."""
        bar = self._bar
        if bar.disable:
            return
        bar.n += 1
        bar.initial = bar.last_print_n = bar.n
        bar.start_t = bar.last_print_t = time.time()
        bar.refresh()

    def _times(self, now: float) -> str:
        timed = self.reached - self._first
        if not timed:
            return ""
        seconds = (now - self._timed_from) / timed
        left = datetime.timedelta(seconds=round(seconds * (self.total - self.reached)))
        return f", {plain(seconds)} s a round, {left} left"

    def _write(self, text: str) -> None:
        for output in self._outputs:
            output.write(f"{_now()} {self._name}: {text}\n")
            output.flush()


def _figures(report: RoundReport) -> str:
    parts = [] if report.epsilon_at_most is None else [f"epsilon at most {upper(report.epsilon_at_most)}"]
    if report.nonprivate is not None:
        metric = report.metric.replace("_", " ")
        parts.append(f"validation {metric} {plain(report.nonprivate['mean'])} (not private)")
    return "".join(f", {part}" for part in parts)


def _can_draw() -> bool:
    return sys.stderr.isatty() or "ipykernel" in sys.modules


def _now() -> str:
    return datetime.datetime.now().isoformat(sep=" ", timespec="seconds")
