"""Defines the registry's entries, which state the most that runs may spend, and reads entries from journal lines."""

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from tff_pdp.errors import ConfigError, DataError
from tff_pdp.journal import GENESIS
from tff_pdp.privacy.accounting.ledger import Ledger
from tff_pdp.registry.matching import RecordSet

FORMAT_VERSION = 1
# Fields of a line that begins an entry, besides what is planned.
_BEGAN = ("run_id", "method", "folder", "records", "record_set", "non_private", "includes")
# Between a run's id and the chain of a copy's last line.
_COPY = ":"


@dataclasses.dataclass(frozen=True)
class Cost:
    """The past or planned spending of a run.

    Attributes:
      text: the ledger as text; None without privacy.
      rounds: number of rounds that the spending covers; 0 for a run that has released nothing.
    """

    text: str | None
    rounds: int

    @classmethod
    def of(cls, ledger: Ledger | None, rounds: int) -> "Cost":
        """Returns the cost of `rounds` rounds whose spending is in `ledger`; `ledger` is None without privacy."""
        return cls(None if ledger is None else ledger.to_json(), rounds)

    @property
    def fields(self) -> dict[str, Any]:
        """The cost as fields of a line of the journal."""
        return {"ledger": self.text, "rounds": self.rounds}

    @functools.cached_property
    def size(self) -> tuple[int, int]:
        """The number of rounds and the number of released events; during a run, neither number decreases."""
        return self.rounds, self.ledger.num_events if self.ledger else 0

    @functools.cached_property
    def ledger(self) -> Ledger | None:
        """The ledger; None without privacy."""
        return None if self.text is None else Ledger.from_json(self.text)


@dataclasses.dataclass(frozen=True)
class Entry:
    """The registry's entry of a run, or of another release of clients' records.

    Attributes:
      run_id: id of the run; for a copy that was continued separately, the id that `copy_of` makes.
      method: name of the trained method, or of another kind of release.
      folder: absolute path of the run's folder when the run began.
      records: name of the file with digests of the run's records.
      record_set: declared name of the set of records; see `RecordSet`.
      non_private: reason why no epsilon holds for the run, even if there is a ledger; None if an epsilon holds.
      planned: the most that the run may spend until its end.
      includes: run id of an earlier release whose cost this run's ledger includes; empty if there is none.
      closed: the most that the run has spent, once the run has ended or was replaced; None while it may continue.
      closings: all values of `closed` so far; there may be several, because a closed run may be continued.
      heads: all heads of the run's own record that were entered, oldest first; empty if unknown. A head is the chain
        hash of the record's last line at that time.
      num_lines: minimal number of lines of the run's own record, for entries of earlier versions without heads.
    """

    run_id: str
    method: str
    folder: str
    records: str
    record_set: RecordSet
    non_private: str | None
    planned: Cost
    includes: str = ""
    closed: Cost | None = None
    closings: tuple[Cost, ...] = ()
    heads: tuple[str, ...] = ()
    num_lines: int = 0

    @property
    def copy_head(self) -> str:
        """The head of the copy's record if the entry is for a copy that was continued separately; otherwise empty."""
        return self.run_id.partition(_COPY)[2]

    @property
    def upper(self) -> Cost:
        """The most that the run has spent by now, as far as the registry knows."""
        return self.closed or self.planned

    @property
    def head(self) -> str:
        """The last entered head of the run's own record; `GENESIS` if no head was entered."""
        return self.heads[-1] if self.heads else GENESIS

    @property
    def first_line(self) -> dict[str, Any]:
        """The entry's first line in the journal."""
        return {"kind": "began", **{name: getattr(self, name) for name in _BEGAN}, **self.planned.fields}

    def copy_of(self, head: str, spent: Cost) -> "Entry":
        """Returns an entry for a copy that was continued separately; `head` of the copy's record is part of the id."""
        return dataclasses.replace(self, run_id=f"{self.run_id}{_COPY}{head}", planned=spent)

    def is_in(self, chains: Collection[str], size: tuple[int, int]) -> bool:
        """Checks if a copy of the run's record covers everything that the registry knows of the run.

        `chains` are the chain hashes of the copy's lines; `size` is the size of its spending, as in `Cost.size`.
        """
        return self.was_at(chains) and all(is_as_large(size, cost.size) for cost in self.closings)

    def was_at(self, chains: Collection[str]) -> bool:
        """Checks if a record, whose lines have the chain hashes `chains`, contains the head that was entered last."""
        # Entries of earlier versions say only how many lines there were.
        return self.head in chains if self.heads else len(chains) >= self.num_lines

    def check_was_at(self, chains: Collection[str]) -> None:
        """Checks that a record contains the head that was entered last; `chains` as in `was_at`.

        Raises:
          DataError: the record does not contain the head.
        """
        if not self.was_at(chains):
            raise DataError(
                f"another copy of the run that began in {self.folder} was continued: this copy is outdated, or has "
                "different rounds. Continue the other copy, or give --overwrite to start again"
            )


def is_as_large(size: tuple[int, int], other: tuple[int, int]) -> bool:
    """Checks if a size, as in `Cost.size`, has at least as many rounds and at least as many events as another size."""
    # One by one: a copy may have run more rounds with fewer events.
    return all(own >= least for own, least in zip(size, other, strict=True))


def _after(entry: Entry, line: Mapping[str, Any]) -> Entry:
    """Returns an entry after one more line."""
    # Lines of earlier versions have no chain of the run's own record, but its number of lines, or neither.
    heads = (*entry.heads, line["head"]) if "head" in line else entry.heads
    num_lines = max(entry.num_lines, line["reached"][0]) if "reached" in line else entry.num_lines
    # A run that had been closed, by a copy that was to be replaced, goes on after all.
    entry = dataclasses.replace(entry, closed=None, heads=heads, num_lines=num_lines)
    if line["kind"] == "reserved":
        return entry
    # An earlier version raised what is planned without saying for how many rounds.
    cost = Cost(line["ledger"], line.get("rounds", entry.planned.rounds))
    if line["kind"] == "raised":
        return dataclasses.replace(entry, planned=cost)
    return dataclasses.replace(entry, closed=cost, closings=(*entry.closings, cost))


def read_entries(path: Path, lines: Sequence[Mapping[str, Any]]) -> dict[str, Entry]:
    """Reads entries from the lines of a journal; keys are run ids.

    Raises:
      DataError: the lines are not those of a registry, or have another format version.
    """
    found: dict[str, Entry] = {}
    try:
        if lines and lines[0]["format_version"] != FORMAT_VERSION:
            version = lines[0]["format_version"]
            raise DataError(f"{path} has format version {version!r}; this tff_pdp reads only {FORMAT_VERSION}")
        for line in lines:
            kind = line["kind"]
            if kind == "began":
                planned = Cost(line["ledger"], line["rounds"])
                found[line["run_id"]] = Entry(**{name: line[name] for name in _BEGAN}, planned=planned)
            elif kind in ("raised", "reserved", "closed"):
                found[line["run_id"]] = _after(found[line["run_id"]], line)
            elif kind not in ("opened", "records"):
                raise ValueError(f"kind {kind!r}")
    except (KeyError, TypeError, ValueError, ConfigError) as error:
        raise DataError(f"{path} is not a registry of runs ({type(error).__name__}: {error})") from error
    return found
