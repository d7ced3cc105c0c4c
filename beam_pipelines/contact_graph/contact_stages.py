"""Makes rows from contacts: one stage sends each contact to both people, the next samples contacts and writes rows."""

import dataclasses
import functools
import logging
from collections.abc import Iterable, Iterator

import numpy as np

from beam_pipelines.contact_graph.input_tables import Chunk, read_chunk
from beam_pipelines.contact_graph.people import SECONDS_PER_DAY, People, PlaceLookup
from beam_pipelines.contact_graph.people_stages import ORDER
from beam_pipelines.contact_graph.row_steps import Columns, count_read_rows, drop_rows, gather, scatter
from beam_pipelines.contact_graph.rows import RowRules, build_rows
from beam_pipelines.contact_graph.sampling import Contacts, Pairs, merge_pairs, sample_pairs, share_repeated
from beam_pipelines.contact_graph.tables import ACTIVITY_NAMES
from beam_pipelines.dataset.accounting import KEPT, READ, count_users
from beam_pipelines.dataset.staging import Extent, write_shard
from beam_pipelines.engine.stages import Piece, Stage, TaskContext, partition_stage
from beam_pipelines.keyed_hash import hexadecimal_names, keyed_uint64
from beam_pipelines.records import Reason
from tff_pdp.data.example_codec import encode_examples
from tff_pdp.data.manifest import SPLITS

CONTACT_COLUMNS = ("pid1", "pid2", "start_time", "duration", "activity1", "activity2")
_TABLE = "population_network"
# Each kept contact becomes two ends, which are counted where they are sent and where they arrive.
_ENDS = "contact_ends"
_END = {"owner": np.int32, "other": np.int32, "start": np.int32, "duration": np.int32, "activity": np.int8}
# Largest expected share of exact repeats: people seldom meet twice at the same second for the same time.
_MOST_REPEATED = 0.1
_LOGGER = logging.getLogger(__name__)
# Number of rows that are encoded at a time.
_BLOCK_ROWS = 1 << 15


def contact_stages(chunks: Iterable[Chunk], rules: RowRules) -> tuple[Stage, ...]:
    """Builds the two stages that turn contacts into rows, and run after the stages that `people_stages` builds."""
    read, write = (functools.partial(work, rules) for work in (_read_contacts, _write_rows))
    return (
        Stage("read_contacts", tuple(chunks), read, gives=("contacts",), after=(ORDER,)),
        partition_stage("write_rows", rules.num_shards, write, takes=("contacts",), after=(ORDER,)),
    )


def _read_contacts(rules: RowRules, task: Chunk, context: TaskContext) -> Iterator[Piece]:
    """Sends both ends of each contact in a chunk to their partitions; drops contacts between groups."""
    people, lookup = People.load(context.folder), PlaceLookup.load(context.folder)
    for rows in read_chunk(task, CONTACT_COLUMNS):
        count_read_rows(context, _TABLE, rows)
        ends = _both_ends(rows.columns, rules, people, lookup, context)
        context.count(_ENDS, READ, len(ends["owner"]))
        partitions = ends["owner"].astype(np.int64) * rules.num_shards // max(len(people), 1)
        yield from scatter("contacts", partitions, rules.num_shards, ends)


def _both_ends(columns: Columns, rules: RowRules, people: People, lookup: PlaceLookup, context: TaskContext) -> Columns:
    first, second = lookup.places(columns["pid1"]), lookup.places(columns["pid2"])
    is_known = (first >= 0) & (second >= 0)
    is_own = columns["pid1"] == columns["pid2"]
    is_sound = (columns["duration"] >= 0) & (columns["start_time"] >= 0)
    is_sound &= columns["start_time"] < SECONDS_PER_DAY
    is_sound &= columns["duration"] <= SECONDS_PER_DAY * rules.layout.observed_days
    for name in ("activity1", "activity2"):
        is_sound &= (columns[name] >= 1) & (columns[name] <= len(ACTIVITY_NAMES))
    for reason, is_bad in (
        (Reason.OWN_CONTACT, is_own),
        (Reason.UNKNOWN_PERSON, ~is_own & ~is_known),
        (Reason.TIME_RANGE, ~is_own & is_known & ~is_sound),
    ):
        drop_rows(_TABLE, reason, columns["pid1"][is_bad], context)
    usable = is_known & is_sound & ~is_own
    first, second = first[usable], second[usable]
    is_inside = (people.silo[first] == people.silo[second]) & (people.group[first] == people.group[second])
    context.count(_TABLE, Reason.OUTSIDE_GROUP, len(first) - is_inside.sum())
    context.count(_TABLE, KEPT, is_inside.sum())
    first, second = first[is_inside], second[is_inside]
    kept = {name: columns[name][usable][is_inside] for name in CONTACT_COLUMNS[2:]}
    return {
        "owner": np.concatenate([first, second]),
        "other": np.concatenate([second, first]),
        "start": np.tile(kept["start_time"].astype(np.int32), 2),
        "duration": np.tile(kept["duration"].astype(np.int32), 2),
        "activity": np.concatenate([kept["activity1"], kept["activity2"]]).astype(np.int8),
    }


def _write_rows(rules: RowRules, task: int, context: TaskContext) -> Iterable[Piece]:
    """Writes the rows of consecutive people, made from all of their contacts, as one shard."""
    people = People.load(context.folder)
    first, last = (-(-number * len(people) // rules.num_shards) for number in (task, task + 1))
    ends = gather(context, "contacts", _END)
    context.count(_ENDS, KEPT, len(ends["owner"]))
    own = Contacts(
        ends["owner"].astype(np.int64) - first,
        ends["other"].astype(np.int64),
        *(ends[name] for name in ("start", "duration", "activity")),
    )
    pairs = merge_pairs(own, len(people))
    repeated = share_repeated(own)
    if repeated > _MOST_REPEATED:
        _LOGGER.warning(
            "shard %d: %.0f%% of the contacts repeat another contact exactly; their durations are added up. Was a part "
            "of %s delivered twice?",
            task,
            100 * repeated,
            _TABLE,
        )
    degrees = np.bincount(pairs.owner, minlength=last - first)
    pids = np.asarray(people.pid[first:last])
    rules.options.rows.degree_bound.check_degrees(degrees, pids)
    sampled = sample_pairs(pairs, rules.layout.num_slots, rules.options.seed, pids, people.pid)
    shard = _Shard(rules, people, first, degrees, sampled)
    write_shard(context.folder, task, rules.num_shards, shard.extents(context))
    return ()


@dataclasses.dataclass(frozen=True)
class _Shard:
    """People of one shard, with their contacts."""

    rules: RowRules
    people: People
    first: int
    degrees: np.ndarray
    pairs: Pairs

    def extents(self, context: TaskContext) -> Iterator[Extent]:
        """Yields the rows by silo and split, in blocks: each person's windows in time, and then tests."""
        last = self.first + len(self.degrees)
        silos = np.asarray(self.people.silo[self.first : last])
        for silo in np.unique(silos).tolist():
            begin, end = self.first + np.searchsorted(silos, [silo, silo + 1])
            splits = np.asarray(self.people.split[begin:end])
            for name in sorted(SPLITS):
                # People are sorted by split, so these are consecutive; everybody may have a test row.
                inside = begin + np.flatnonzero((splits == SPLITS.index(name)) | (name == "test"))
                if len(inside):
                    yield from self._blocks(silo, name, int(inside[0]), int(inside[-1]) + 1, context)

    def _blocks(self, silo: int, split: str, begin: int, end: int, context: TaskContext) -> Iterator[Extent]:
        for start in range(begin, end, _BLOCK_ROWS):
            for x, y, ids in self._examples(split, start, min(start + _BLOCK_ROWS, end)):
                # The rows were counted as read when people were ordered.
                count_users(context, KEPT, users=0, examples=len(y))
                if len(y):
                    records = encode_examples(self.rules.features, x, y, ids)
                    yield Extent(self.people.silos[silo], split, records, len(y))

    def _examples(self, split: str, begin: int, end: int) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Yields features, labels and names of the rows of consecutive people, one window in time after another."""
        settings, seed = self.rules.options.rows, self.rules.options.seed
        pids = np.asarray(self.people.pid[begin:end])
        if split == "test":
            target = np.asarray(self.people.target[begin:end])
            chosen = target >= 0
            starts = np.full(len(pids), settings.num_days, np.int64)
            names = hexadecimal_names(seed, "test", pids)
            yield self._rows(begin, end, starts)[chosen], target[chosen].astype(np.int64), names[chosen]
            return
        infected = np.asarray(self.people.infected[begin:end]).astype(np.int64)
        for window in range(settings.num_windows):
            number = np.full(len(pids), window, np.int64)
            # The first day after each row's history is drawn by a hash of the person's id and the window.
            choices = np.uint64(settings.num_days - settings.prediction_days - settings.window_days + 1)
            starts = settings.window_days + (keyed_uint64(seed, "window", pids, number) % choices).astype(np.int64)
            is_ill = (infected >= starts) & (infected < starts + settings.prediction_days)
            names = hexadecimal_names(seed, "row", pids, number)
            yield self._rows(begin, end, starts), is_ill.astype(np.int64), names

    def _rows(self, begin: int, end: int, starts: np.ndarray) -> np.ndarray:
        low, high = np.searchsorted(self.pairs.owner, [begin - self.first, end - self.first])
        pairs = Pairs(*(values[low:high] for values in self.pairs))
        pairs = pairs._replace(owner=pairs.owner - (begin - self.first))
        degrees = self.degrees[begin - self.first : end - self.first]
        return build_rows(self.rules.layout, self.people, begin, degrees, pairs, starts)
