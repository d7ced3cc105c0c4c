"""Records the most that a run may have spent of its budget, on disk before anything is spent.

A run's `charges.jsonl` is a journal (`tff_pdp.journal`) with lines of these kinds:

opened: identity of the run, with the reason if no privacy is claimed for the run.
reserved: rounds that may be run from now on, with the ledger after the last reserved round.
chosen: modes in which the engine computes clients from now on; results of other modes are rounded differently.
redrawn: rounds from `first_round` on are run again with new noise; all earlier charges still count.
closed: the last round was run, with the ledger after that round.
extended: a closed run goes on, with further rounds, the settings that changed, and the ledger before these rounds.
sealed: the run's key and states are about to be destroyed, or are destroyed; no line follows.
"""

import dataclasses
import secrets
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from tff_pdp.errors import ConfigError, DataError
from tff_pdp.journal import GENESIS, Content, Journal, read
from tff_pdp.privacy.accounting.ledger import Ledger
from tff_pdp.privacy.plans.extension import EarlierRounds

CHARGES_FILE = "charges.jsonl"
FORMAT_VERSION = 1
_KINDS = ("opened", "reserved", "chosen", "redrawn", "closed", "extended", "sealed")
# Kinds of lines that begin an attempt.
_BEGINNINGS = ("opened", "redrawn", "extended")


@dataclasses.dataclass(frozen=True)
class RunIdentity:
    """The identity of a run, as stated in the line `opened`.

    Attributes:
      method: name of the method.
      non_private: reason why no epsilon is claimed, even if there is a ledger; None if an epsilon is claimed.
      key_fingerprint: fingerprint of the run key, which reveals nothing about the key.
      config_hash: digest of the run's settings and data, keyed by the run key.
      earlier_head: chain hash of the last line of the record of earlier releases when the run began.
      run_id: 32 hexadecimal digits, drawn at random for each new run.
    """

    method: str
    non_private: str | None
    key_fingerprint: str
    config_hash: str
    earlier_head: str = GENESIS
    run_id: str = dataclasses.field(default_factory=lambda: secrets.token_hex(16))


@dataclasses.dataclass(frozen=True)
class Extension:
    """Further rounds of a run that had ended, as stated in the line `extended`.

    Attributes:
      after_round: last round before the extension.
      settings: values of the settings that may change with an extension, by dotted key.
      config_hash: digest, by `RunKey.keyed`, of the settings that the run goes on with.
      replaces: the digest of the settings before the extension.
      salt: value of `RunKey.salt` for the further rounds.
      ended_with: text of the ledger after the last round before the extension; None without privacy.
    """

    after_round: int
    settings: Mapping[str, Any]
    config_hash: str
    replaces: str
    salt: str
    ended_with: str | None

    @property
    def earlier(self) -> EarlierRounds:
        """The rounds before the extension, as a plan of the further rounds takes them."""
        return EarlierRounds(self.after_round, self.ended_with, self.salt)


@dataclasses.dataclass(frozen=True)
class Attempt:
    """Consecutive rounds whose noise and batches are drawn from one key.

    Attributes:
      number: number of earlier attempts.
      first_round: first round of the attempt.
      ledger: ledger before the first round; None without privacy.
      arithmetic: result of `arithmetic_of` for each reservation; keys are the last rounds of reservations.
      salt: value of `RunKey.salt`.
    """

    number: int
    first_round: int
    ledger: Ledger | None
    arithmetic: Mapping[int, Mapping[str, Any]]
    salt: str = ""

    def can_be_repeated(self, round_number: int, arithmetic: Mapping[str, Any]) -> bool:
        """Checks if the rounds after `round_number` that may have been run would have the same bits if repeated."""
        later = (stored for through_round, stored in self.arithmetic.items() if through_round > round_number)
        return all(stored == arithmetic for stored in later)


@dataclasses.dataclass(frozen=True)
class Charges:
    """The content of a run's record.

    Attributes:
      identity: identity of the run.
      ledger: the most that the run has spent; None without privacy.
      through_round: the last round that may have been run; 0 if nothing has been released.
      is_closed: whether the run has ended, so that `ledger` is the ledger after the last round.
      is_sealed: whether the run's key and states are destroyed or about to be destroyed.
      attempt: the newest attempt; a further attempt begins if rounds must be run with new noise.
      choices: mode in which the engine computes clients, by fingerprint of the computation; and its `device`, if timed.
      chains: chain hashes of all lines, in order.
      extensions: extensions of the run, oldest first.
    """

    identity: RunIdentity
    ledger: Ledger | None
    through_round: int
    is_closed: bool
    is_sealed: bool
    attempt: Attempt
    choices: Mapping[str, str]
    chains: tuple[str, ...]
    extensions: tuple[Extension, ...] = ()

    @property
    def earlier(self) -> EarlierRounds | None:
        """The rounds before the newest extension; None for a run without extensions."""
        return self.extensions[-1].earlier if self.extensions else None

    @property
    def spending(self) -> tuple[str, ...]:
        """Chain hashes of the lines about spending: all lines except `sealed`."""
        return self.chains[:-1] if self.is_sealed else self.chains

    @property
    def head(self) -> str:
        """The chain hash of the last line about spending."""
        return self.spending[-1]

    @property
    def run_id(self) -> str:
        """The run's id."""
        return self.identity.run_id


def read_charges(folder: Path) -> Charges | None:
    """Reads the charges of the run in a folder; None if no run has begun.

    Guarantee: `ledger` covers at least the run's spending, even if the run was killed: no command has acted on an
      incomplete line.

    Raises:
      DataError: a line is damaged or missing.
    """
    return _charges(folder / CHARGES_FILE, read(folder / CHARGES_FILE))


def run_id_of(folder: Path) -> str | None:
    """Returns the id of the run in a folder; None for a run of the first version, or if there is no run."""
    charges = read_charges(folder)
    return None if charges is None else charges.run_id


class ChargesWriter:
    """The open record of a run, for reading and writing; a context manager.

    Guarantee: when `reserve` returns, the reservation outlasts a power cut. Rounds are run only after `reserve`.

    Ledgers are None without privacy.

    Attributes:
      path: path of the file.
      charges: the present content of the record; None before a run has begun.
    """

    def __init__(self, folder: Path):
        """Opens the record of the run in a folder, or begins a new record.

        Raises:
          DataError: a line is damaged or missing.
        """
        self.path = folder / CHARGES_FILE
        self._journal = Journal(self.path)
        try:
            self.charges = _charges(self.path, self._journal.content)
        except BaseException:
            self._journal.close()
            raise

    @property
    def begun(self) -> Charges:
        """The present content of the record; raises DataError before a run has begun."""
        if self.charges is None:
            raise DataError(f"{self.path} has no run: restore it from a copy")
        return self.charges

    def open_run(self, identity: RunIdentity, ledger: Ledger | None) -> None:
        """Begins the record of a run; `ledger` has the releases before the first round.

        Raises:
          DataError: the folder has a run already.
        """
        if self.charges is not None:
            raise DataError(f"{self.path} has a run already")
        self._append("opened", ledger, format_version=FORMAT_VERSION, **dataclasses.asdict(identity))

    def reserve(self, through_round: int, ledger: Ledger | None, arithmetic: Mapping[str, Any]) -> None:
        """Reserves rounds that are about to be run.

        Args:
          through_round: last reserved round.
          ledger: ledger after the last reserved round.
          arithmetic: conditions that decide how a round's sums are rounded, from `arithmetic_of`.
        """
        self._append("reserved", ledger, through_round=through_round, arithmetic=dict(arithmetic))

    def choose(self, choices: Mapping[str, str]) -> None:
        """Records the modes in which clients are computed, by fingerprint of the computation, before a result is used.

        Raises:
          DataError: no run has begun.
        """
        self._append("chosen", self.begun.ledger, choices=dict(choices))

    def redraw(self, first_round: int, ledger: Ledger | None) -> Attempt:
        """Begins a new attempt: rounds from `first_round` on are run with new noise; earlier charges still count.

        `ledger` is the ledger on record, plus the cost of drawing anew if there is one.

        Raises:
          DataError: no run has begun.
        """
        _ = self.begun
        self._append("redrawn", ledger, first_round=first_round)
        return self.begun.attempt

    def extend(self, ledger: Ledger | None, extension: Extension) -> Attempt:
        """Begins a new attempt with further rounds of a closed run; `ledger` is the ledger before these rounds.

        Raises:
          DataError: the run has not ended.
        """
        if not self.begun.is_closed:
            raise DataError(f"{self.path}: the run has not ended, and cannot be extended")
        self._append("extended", ledger, first_round=extension.after_round + 1, **dataclasses.asdict(extension))
        return self.begun.attempt

    def close_run(self, through_round: int, ledger: Ledger | None) -> None:
        """Closes the record after the last round, `through_round`, with the ledger after that round."""
        self._append("closed", ledger, through_round=through_round)

    def seal_run(self) -> None:
        """Records that the run's key and states are about to be destroyed; no line may follow.

        Raises:
          DataError: no run has begun.
        """
        self._append("sealed", self.begun.ledger)

    def close(self) -> None:
        """Closes the file."""
        self._journal.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _append(self, kind: str, ledger: Ledger | None, **fields: Any) -> None:
        if self.charges is not None and self.charges.is_sealed:
            raise ConfigError(sealed_sentence(self.path.parent))
        text = None if ledger is None else ledger.to_json()
        self._journal.append({"kind": kind, "ledger": text, **fields})
        self.charges = _charges(self.path, self._journal.content)


def sealed_sentence(folder: Path) -> str:
    """Returns the error message for commands that need a sealed run's key or states."""
    return (
        f"{folder} was sealed: its key and states are gone, so that the run cannot be trained, tested or exported any "
        "more. Its ledger, its results and its exports remain"
    )


def _charges(path: Path, content: Content) -> Charges | None:
    if not content.lines:
        return None
    opened, last = content.lines[0], content.lines[-1]
    try:
        if opened["kind"] != "opened" or {line["kind"] for line in content.lines[1:]} - set(_KINDS[1:]):
            raise ValueError("a line of an unknown kind")
        version = opened["format_version"]
        if version != FORMAT_VERSION:
            raise DataError(
                f"{path} has format version {version!r}; this version of tff_pdp reads only {FORMAT_VERSION}"
            )
        names = (field.name for field in dataclasses.fields(RunIdentity))
        return Charges(
            identity=RunIdentity(**{name: opened[name] for name in names}),
            ledger=_ledger(last),
            # An attempt may have ended at an earlier round than the attempt before.
            through_round=max((line["through_round"] for line in content.lines if "through_round" in line), default=0),
            is_closed=content.lines[-2 if last["kind"] == "sealed" else -1]["kind"] == "closed",
            is_sealed=last["kind"] == "sealed",
            attempt=_newest_attempt(content),
            choices={name: mode for line in content.lines for name, mode in line.get("choices", {}).items()},
            chains=tuple(content.chains),
            extensions=tuple(_extension(line) for line in content.lines if line["kind"] == "extended"),
        )
    except (KeyError, TypeError, ValueError, ConfigError) as error:
        raise DataError(f"{path} is no record of a run's charges ({type(error).__name__}: {error})") from error


def _newest_attempt(content: Content) -> Attempt:
    """Reads the lines from the last one that begins an attempt."""
    begins = [place for place, line in enumerate(content.lines) if line["kind"] in _BEGINNINGS]
    first = content.lines[begins[-1]]
    return Attempt(
        number=len(begins) - 1,
        first_round=first.get("first_round", 1),
        ledger=_ledger(first),
        arithmetic={
            line["through_round"]: line["arithmetic"]
            for line in content.lines[begins[-1] :]
            if line["kind"] == "reserved"
        },
        salt=next((line["salt"] for line in reversed(content.lines) if line["kind"] == "extended"), ""),
    )


def _extension(line: Mapping[str, Any]) -> Extension:
    return Extension(**{field.name: line[field.name] for field in dataclasses.fields(Extension)})


def counts_of(ledger: Ledger | None) -> Counter[Any]:
    """Counts the releases in a ledger, by scope, event and reason."""
    found: Counter[Any] = Counter()
    for entry in () if ledger is None else ledger.entries:
        found[(entry.scope, entry.event, entry.reason)] += entry.count
    return found


def _ledger(line: Mapping[str, Any]) -> Ledger | None:
    return None if line["ledger"] is None else Ledger.from_json(line["ledger"])
