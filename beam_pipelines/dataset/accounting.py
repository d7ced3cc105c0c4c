"""Counts the records that a job read, kept and dropped, and checks that none was lost in between.

Counts have the names `<kind>/read`, `<kind>/kept` and `<kind>/<reason>`. The kind of the counted records is `users`
(or clients), `examples`, or a name of rows, such as the name of a table. The check finds a record lost between two
stages only if the record is counted as read in the first stage, and as kept or dropped in the second.
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping

from beam_pipelines.engine.stages import TaskContext
from beam_pipelines.records import Reason
from tff_pdp.data.manifest import RecordCounts, Tally

USERS, EXAMPLES = "users", "examples"
READ, KEPT = "read", "kept"


def count_users(context: TaskContext, what: str, users: int, examples: int) -> None:
    """Counts users (or clients) and examples; `what` is `READ`, `KEPT`, or the `Reason` why they are dropped."""
    context.count(USERS, what, users)
    context.count(EXAMPLES, what, examples)


@dataclasses.dataclass(frozen=True)
class Counts:
    """Totals of a finished job by kind of record; `read` is the sum of `kept` and all numbers in `dropped`."""

    records: Mapping[str, RecordCounts]

    @property
    def read(self) -> Tally:
        """Returns the numbers of users and examples read."""
        return Tally(self._of(USERS).read, self._of(EXAMPLES).read)

    @property
    def kept(self) -> Tally:
        """Returns the numbers of clients and examples kept."""
        return Tally(self._of(USERS).kept, self._of(EXAMPLES).kept)

    @property
    def dropped(self) -> dict[str, Tally]:
        """Returns the numbers of users and examples dropped, by reason."""
        users, examples = self._of(USERS).dropped, self._of(EXAMPLES).dropped
        reasons = [reason.value for reason in Reason if reason in users or reason in examples]
        return {reason: Tally(users.get(reason, 0), examples.get(reason, 0)) for reason in reasons}

    @property
    def rows(self) -> dict[str, RecordCounts]:
        """Returns the counts of each table's rows; the counts of users and examples are left out."""
        return {kind: counts for kind, counts in self.records.items() if kind not in (USERS, EXAMPLES)}

    def worst_input(self) -> tuple[str, RecordCounts, float]:
        """Returns the kind of record (except users) with the largest share of bad input, its counts, and that share."""
        shares = {
            kind: sum(number for reason, number in counts.dropped.items() if Reason(reason).is_bad_input)
            / max(counts.read, 1)
            for kind, counts in self.records.items()
            if kind != USERS
        }
        worst = max(shares, key=lambda kind: shares[kind], default=EXAMPLES)
        return worst, self._of(worst), shares.get(worst, 0.0)

    def describe_dropped(self, kind: str) -> str:
        """Lists on one line why records of a kind were dropped, with counts, the most frequent reason first."""
        if kind == EXAMPLES:
            ordered = sorted(self.dropped.items(), key=lambda item: (-item[1].examples, item[0]))
            return ", ".join(f"{reason}: {tally.users} users, {tally.examples} examples" for reason, tally in ordered)
        by_reason = sorted(self._of(kind).dropped.items(), key=lambda item: (-item[1], item[0]))
        return ", ".join(f"{reason}: {number} rows" for reason, number in by_reason)

    def _of(self, kind: str) -> RecordCounts:
        return self.records.get(kind, RecordCounts())


def add_up(counts: Mapping[str, int]) -> Counts:
    """Groups a job's summed counts by kind of record; raises RuntimeError if records were lost or counted twice."""
    by_kind: dict[str, Counter[str]] = {}
    for name, number in counts.items():
        kind, _, what = name.partition("/")
        by_kind.setdefault(kind, Counter())[what] += number
    records = {}
    for kind, numbers in sorted(by_kind.items()):
        dropped = {reason.value: numbers[reason] for reason in Reason if numbers[reason]}
        found = RecordCounts(numbers[READ], numbers[KEPT], dropped)
        if found.read != found.kept + sum(dropped.values()) or sum(numbers.values()) != 2 * found.read:
            raise RuntimeError(f"{kind} were lost or counted twice (read is not kept + dropped): {dict(numbers)}")
        records[kind] = found
    return Counts(records)
