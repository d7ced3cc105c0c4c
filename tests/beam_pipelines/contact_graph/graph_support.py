"""What tests of contact graphs share: towns of a few people as tables, and stages run by plain loops, without Beam."""

import dataclasses
import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow.parquet

from beam_pipelines.contact_graph import job as job_module
from beam_pipelines.contact_graph.job import run_contact_graph_job
from beam_pipelines.contact_graph.rows import ContactGraphOptions, RowSettings
from beam_pipelines.dataset.accounting import Counts, add_up
from beam_pipelines.dataset.job import DatasetJob
from beam_pipelines.dataset.staging import INDEX_FOLDER
from beam_pipelines.engine.stages import Stage
from beam_pipelines.engine.tasks import TaskRun, read_reports
from tests.data.written_clients import as_stored
from tff_pdp.data.example_codec import decode_examples, record_layouts
from tff_pdp.data.manifest import DEAD_LETTER_FOLDER, SHARD_FOLDER
from tff_pdp.errors import DataError
from tff_pdp.settings import read_settings

SILOS = ("east", "west")


@dataclasses.dataclass(frozen=True)
class Person:
    """Somebody, with the days on which they are infected and recover (None: never) and what they do, seconds a day."""

    region: str = "east"
    hid: int = 1
    age: int = 30
    sex: int = 1
    school: str = "none"
    infected: int | None = None
    recovered: int | None = None
    target: int | None = None
    activities: tuple[tuple[int, int], ...] = ()


@dataclasses.dataclass(frozen=True)
class Contact:
    """Two people meet: each does what it does (1 home to 7 religion)."""

    pid1: int
    pid2: int
    start: int = 0
    duration: int = 3600
    activity1: int = 1
    activity2: int = 1

    @property
    def ends(self) -> frozenset[int]:
        return frozenset((self.pid1, self.pid2))


@dataclasses.dataclass(frozen=True)
class Town:
    people: dict[int, Person]
    contacts: tuple[Contact, ...] = ()
    household_sizes: dict[int, int] = dataclasses.field(default_factory=lambda: {1: 4})

    def write(self, folder: Path, num_days: int = 57) -> Path:
        """Writes the tables as CSV and returns their folder."""
        folder.mkdir(exist_ok=True)
        people = self.people.items()
        states = []
        for pid, person in people:
            last = num_days if person.recovered is None else person.recovered
            if person.infected is not None:
                states += [f"{day},{pid},I" for day in range(person.infected, last)]
            if person.recovered is not None:
                states += [f"{day},{pid},R" for day in range(last, num_days)]
        for table, header, lines in (
            ("person", "pid,hid,age,sex,region,school", (f"{pid},{_csv_person(person)}" for pid, person in people)),
            ("household", "hid,hh_size", (f"{hid},{size}" for hid, size in self.household_sizes.items())),
            (
                "activity_location_assignment",
                "pid,lid,activity_type,start_time,duration",
                (f"{pid},7,{kind},0,{seconds}" for pid, person in people for kind, seconds in person.activities),
            ),
            ("disease_outcome_training", "day,pid,state", states),
            (
                "target",
                "pid,infected",
                (f"{pid},{person.target}" for pid, person in people if person.target is not None),
            ),
            (
                "population_network",
                "pid1,pid2,lid,start_time,duration,activity1,activity2",
                (f"{c.pid1},{c.pid2},9,{c.start},{c.duration},{c.activity1},{c.activity2}" for c in self.contacts),
            ),
        ):
            (folder / f"{table}.csv").write_text("\n".join([header, *lines, ""]))
        return folder


@dataclasses.dataclass(frozen=True)
class Row:
    """One example of a data set, as stored."""

    client: str
    split: str
    x: bytes
    y: int


def job_of(options: ContactGraphOptions) -> DatasetJob:
    """The job that these options ask for, not run."""
    with mock.patch.object(job_module, "run_dataset_job", lambda job, options: job):
        return run_contact_graph_job(options)  # pyright: ignore[reportReturnType]


def run_in_memory(stages: Iterable[Stage], folder: Path) -> Counts:
    """Runs stages by plain loops in this thread, and adds up what they counted."""
    shutil.rmtree(folder, ignore_errors=True)
    for name in (SHARD_FOLDER, INDEX_FOLDER, DEAD_LETTER_FOLDER):
        (folder / name).mkdir(parents=True, exist_ok=True)
    given = {}
    counts = Counter()
    for stage in stages:
        for number in range(len(stage.tasks)):
            tables = {table: given.get((table, number), []) for table in stage.takes}
            run = TaskRun(stage, number, tables, folder)
            for piece in run.pieces():
                given.setdefault((piece.table, piece.partition), []).append(piece.batch)
            run.report()
        for report in read_reports(folder, stage.name):
            if report.error:
                raise DataError(report.error)
            counts.update(report.counts)
    return add_up(counts)


def read_rows(folder: Path, job: DatasetJob) -> dict[str, Row]:
    """The examples of all shards in a staging folder, by their id."""
    rows = {}
    for index in sorted((folder / INDEX_FOLDER).glob("*.parquet")):
        shard = next((folder / SHARD_FOLDER).glob(f"part-{index.stem}-*")).read_bytes()
        for extent in pyarrow.parquet.read_table(index).to_pylist():
            records = shard[extent["offset"] : extent["offset"] + extent["nbytes"]]
            xs, ys = decode_examples(job.features, records, "shard")
            # Labels of one byte, so that all records are as long.
            layout = record_layouts(job.features)[0]
            assert len(records) == layout.length * extent["num_examples"]
            for number, (x, y) in enumerate(zip(as_stored(job.features, xs), ys, strict=True)):
                name = records[number * layout.length :][layout.example_id].decode()
                assert name not in rows
                rows[name] = Row(extent["client_id"], extent["split"], x.tobytes(), int(y))
    return rows


def letters_of(folder: Path) -> list[dict[str, Any]]:
    """The dead letters in a staging folder or a data set."""
    files = sorted((folder / DEAD_LETTER_FOLDER).glob("*.jsonl"))
    return [json.loads(line) for path in files for line in path.read_text().splitlines()]


def rows_of(town: Town, folder: Path, **changes) -> tuple[dict[str, Row], DatasetJob]:
    """What the job makes of a town, in memory."""
    job = job_of(options_of(town.write(folder / "input"), folder, **changes))
    run_in_memory(job.stages, folder / "staging")
    return read_rows(folder / "staging", job), job


def options_of(source: Path, folder: Path, **changes) -> ContactGraphOptions:
    fields = {
        "input": source,
        "output": folder / "rows",
        "min_people_per_silo": 1,
        "num_shards": 2,
        "max_bad_fraction": 1.0,
    }
    of_rows = {name: changes.pop(name) for name in RowSettings.__struct_fields__ if name in changes}
    rows = read_settings(RowSettings, {"degree_bound": {"kind": "edge"}, **of_rows}, "a test", "rows")
    return ContactGraphOptions(**fields | changes, rows=rows)


def small_town(num_people: int = 24, seed: int = 0) -> Town:
    """People 1 to `num_people` of two silos, with contacts within them and between."""
    generator = np.random.default_rng(seed)
    people = {
        pid: random_person(generator, region=SILOS[pid % 2], hid=pid % 5, school="ab"[pid % 3 == 0])
        for pid in range(1, num_people + 1)
    }
    pairs = (generator.choice(num_people, 2, replace=False) + 1 for _ in range(3 * num_people))
    contacts = tuple(random_contact(generator, *pair.tolist()) for pair in pairs)
    return Town(people, contacts, {hid: 2 + hid for hid in range(5)})


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def hash_by_hand(seed: int, purpose: str, *ids: int) -> int:
    """The hash that rows are sampled by, in Python's integers: SplitMix64's finaliser after each id."""
    digest = hashlib.blake2b(purpose.encode(), digest_size=8, key=str(seed).encode()).digest()
    state = int.from_bytes(digest, "little")
    for number in ids:
        state = (state + number + 0x9E3779B97F4A7C15) % 2**64
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) % 2**64
        state ^= state >> 31
    return state


def name_by_hand(seed: int, purpose: str, *ids: int) -> str:
    """What a row is called."""
    return "".join(f"{hash_by_hand(seed, f'{purpose} {half}', *ids):016x}" for half in (0, 1))


def random_person(generator: np.random.Generator, **fixed) -> Person:
    """Somebody with an age, a sex, days of illness and activities of their own."""
    infected, recovered = sorted(generator.choice(57, 2, replace=False).tolist())
    kinds = generator.choice(np.arange(1, 8), 2, replace=False).tolist()
    return Person(
        **{
            "age": int(generator.integers(0, 100)),
            "sex": int(generator.integers(1, 3)),
            "infected": infected if generator.random() < 0.8 else None,
            "recovered": recovered if generator.random() < 0.8 else None,
            "activities": tuple((kind, int(generator.integers(1, 40_000))) for kind in kinds),
            "target": int(generator.integers(0, 2)),
            **fixed,
        }
    )


def random_contact(generator: np.random.Generator, first: int, second: int) -> Contact:
    """A contact of two people at some time."""
    start, duration = generator.integers(0, 86_400), generator.integers(1, 20_000)
    return Contact(first, second, int(start), int(duration), *generator.integers(1, 8, 2).tolist())


def _csv_person(person: Person) -> str:
    return f"{person.hid},{person.age},{person.sex},{person.region},{person.school}"
