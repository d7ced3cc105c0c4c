"""A small job of three stages, whose last tasks write down all that reached them, and in which order."""

import json
import os
import time

import pyarrow

from beam_pipelines.engine.stages import Piece, Stage, partition_stage
from beam_pipelines.engine.tasks import REPORT_FOLDER
from tff_pdp.errors import DataError

NUM_READERS, NUM_PARTITIONS = 6, 4


def stages_of(read=None, gives=("squares", "cubes", "marks")):
    """Readers give numbers to partitions, which add them up; the sums come together in one task."""
    return (
        Stage("read", tuple(f"file {number}" for number in range(NUM_READERS)), read or read_task, gives=gives),
        partition_stage("add", NUM_PARTITIONS, add_task, takes=("squares", "cubes"), gives=("sums",)),
        partition_stage("collect", 1, collect_task, takes=("sums", "marks"), after=("add",)),
    )


def read_task(task, context):
    """Pieces for partition `number % 3`, one of them empty; nothing is for partition 3. A mark for the last stage."""
    assert task == f"file {context.number}"
    number = context.number
    context.count("numbers", "read", 2)
    context.count("numbers", "kept", 2)
    for table, values in (("squares", [number**2]), ("cubes", [number**3]), ("squares", [-number, 0]), ("cubes", [])):
        yield Piece(table, number % 3, batch_of(values))
    yield Piece("marks", 0, batch_of([number]))


def add_task(task, context):
    """All that reached a partition, as text in a file; the sum goes on to partition 0."""
    received = {table: [batch["value"].to_pylist() for batch in batches] for table, batches in context.tables.items()}
    write_note(context, f"add-{task}", received)
    total = sum(value for batches in received.values() for values in batches for value in values)
    yield Piece("sums", 0, batch_of([total]))


def collect_task(task, context):
    """The sums, once all files of the stage before lie there."""
    names = sorted(path.name for path in context.folder.glob("add-*"))
    sums = [batch["value"].to_pylist() for batch in context.tables["sums"]]
    write_note(context, f"collect-{task}", [names, sums, sum(map(len, context.tables["marks"]))])
    return ()


def slow_read_task(task, context):
    """The same, long enough for a second worker to take part; leaves the number of its process."""
    time.sleep(0.1)
    (context.folder / f"process-{os.getpid()}").touch()
    yield from read_task(task, context)


def failing_read_task(task, context):
    """Input of the files 2 and 4 is no good."""
    yield from read_task(task, context)
    if context.number in (2, 4):
        raise DataError(f"{task}: no good")


def batch_of(values):
    return pyarrow.RecordBatch.from_pydict({"value": pyarrow.array(values, pyarrow.int64())})


def write_note(context, name, content):
    (context.folder / name).write_text(json.dumps(content))


def notes_in(folder):
    return {path.name: json.loads(path.read_text()) for path in folder.iterdir() if path.name[:3] in ("add", "col")}


def tasks_done(folder):
    """Stage and number of the tasks that have left a report."""
    return {(path.parent.name, int(path.stem)) for path in (folder / REPORT_FOLDER).glob("*/*.json")}
