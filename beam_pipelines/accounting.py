"""Counts what a job read, kept and dropped in Beam metrics, and proves that nothing was lost in between."""

import dataclasses
from collections.abc import Mapping

from apache_beam.metrics.metric import Metrics
from apache_beam.runners.runner import PipelineResult

from beam_pipelines.schema import Reason
from tff_pdp.data.manifest import Tally

_NAMESPACE = "client_dataset"
_READ = "read"
_KEPT = "kept"


def count_read(examples: int) -> None:
    """Counts one copy of a user as read."""
    _count(_READ, 1, examples)


def count_kept(examples: int) -> None:
    """Counts one client as kept."""
    _count(_KEPT, 1, examples)


def count_dropped(reason: Reason, users: int, examples: int) -> None:
    """Counts users and examples as left out."""
    _count(reason.value, users, examples)


@dataclasses.dataclass(frozen=True)
class Counts:
    """The totals of a finished job; `read` is the sum of `kept` and all of `dropped`."""

    read: Tally
    kept: Tally
    dropped: Mapping[Reason, Tally]

    @property
    def bad_fraction(self) -> float:
        """Share of the examples read that became dead letters."""
        bad = sum(tally.examples for reason, tally in self.dropped.items() if reason.is_bad_input)
        return bad / max(self.read.examples, 1)

    def describe_dropped(self) -> str:
        """Reasons with their counts, the most frequent first, on one line."""
        ordered = sorted(self.dropped.items(), key=lambda item: (-item[1].examples, item[0]))
        return ", ".join(f"{reason}: {tally.users} users, {tally.examples} examples" for reason, tally in ordered)


def collect_counts(result: PipelineResult) -> Counts:
    """Reads the metrics of a finished pipeline.

    Raises:
      RuntimeError: the counts do not add up, so records were lost or counted twice.
    """
    values: dict[str, int] = {}
    for metric in result.metrics().query()["counters"]:
        name = metric.key.metric
        if name.namespace == _NAMESPACE:
            # Runners without committed values report only attempted ones.
            value = metric.committed if metric.committed is not None else metric.attempted
            values[name.name] = values.get(name.name, 0) + (value or 0)
    tallies = {
        what: Tally(values.get(f"{what}_users", 0), values.get(f"{what}_examples", 0))
        for what in (_READ, _KEPT, *(reason.value for reason in Reason))
    }
    dropped = {reason: tallies[reason.value] for reason in Reason if tallies[reason.value] != Tally()}
    counts = Counts(tallies[_READ], tallies[_KEPT], dropped)
    accounted = Tally(
        counts.kept.users + sum(tally.users for tally in dropped.values()),
        counts.kept.examples + sum(tally.examples for tally in dropped.values()),
    )
    if accounted != counts.read:
        raise RuntimeError(f"records were lost: read {counts.read}, but kept and dropped add up to {accounted}")
    return counts


def _count(what: str, users: int, examples: int) -> None:
    Metrics.counter(_NAMESPACE, f"{what}_users").inc(users)
    Metrics.counter(_NAMESPACE, f"{what}_examples").inc(examples)
