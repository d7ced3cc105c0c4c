"""Does the contact-graph job as one would by hand on one machine: with Polars, all in memory, in one process.

Joins, groups and samples with Polars, and computes the numbers of a row with the job's own function, so that both do
the same work. Writes rows as Parquet, without checks, dead letters or a way to resume.

  python -m benchmarks.preparing.polars_rows INPUT OUTPUT
"""

import argparse
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow
import pyarrow.parquet

from beam_pipelines.contact_graph.people import NEVER, People, person_features
from beam_pipelines.contact_graph.rows import RowLayout, build_rows
from beam_pipelines.contact_graph.sampling import Pairs
from beam_pipelines.contact_graph.tables import ACTIVITY_NAMES, read_observed_days
from beam_pipelines.keyed_hash import keyed_uint64
from tff_pdp.data.manifest import SPLITS

NUM_SLOTS, WINDOW_DAYS, NUM_DAYS, PREDICTION_DAYS, VALIDATION_FRACTION, SEED = 20, 21, 57, 7, 0.1, 0
_BLOCK = 1 << 15


def main() -> None:
    """Makes rows of a population."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input", type=Path)
    parser.add_argument("output", type=Path)
    options = parser.parse_args()
    people = read_people(options.input)
    pairs, degrees = sample_contacts(options.input, people)
    layout = RowLayout("slots", NUM_SLOTS, WINDOW_DAYS, read_observed_days(options.input))
    write_rows(options.output, layout, people, pairs, degrees)


def read_people(folder: Path) -> People:
    """Returns all people, sorted by region, split and id."""
    hours = pl.scan_parquet(folder / "activity_location_assignment.parquet").group_by("pid", "activity_type")
    states = pl.scan_parquet(folder / "disease_outcome_training.parquet").filter(pl.col("state") != "S")
    days = states.group_by("pid").agg(
        pl.col("day").filter(pl.col("state") == "I").min().fill_null(NEVER).alias("infected"),
        pl.col("day").filter(pl.col("state") == "R").min().fill_null(NEVER).alias("recovered"),
    )
    table = (
        pl.scan_parquet(folder / "person.parquet")
        .join(pl.scan_parquet(folder / "household.parquet"), on="hid")
        .join(days, on="pid", how="left")
        .join(pl.scan_parquet(folder / "target.parquet").rename({"infected": "target"}), on="pid", how="left")
        .with_columns(
            pl.col("region").cast(pl.String),
            pl.col("infected", "recovered").fill_null(NEVER),
            pl.col("target").fill_null(-1),
        )
        .collect()
    )
    limit = np.uint64(VALIDATION_FRACTION * 2.0**64)
    is_validation = keyed_uint64(SEED, "split", table["pid"].to_numpy()) < limit
    split = np.where(is_validation, SPLITS.index("validation"), SPLITS.index("train")).astype(np.int8)
    table = table.with_columns(pl.Series("split", split)).sort("region", "split", "pid")
    seconds = np.zeros((len(table), len(ACTIVITY_NAMES)))
    durations = hours.agg(pl.col("duration").sum()).collect()
    places = table.select("pid").with_row_index("place")
    durations = durations.join(places, on="pid")
    seconds[durations["place"].to_numpy(), durations["activity_type"].to_numpy() - 1] = durations["duration"].to_numpy()
    regions = sorted(table["region"].unique().to_list())
    column = {name: table[name].to_numpy() for name in table.columns if name != "region"}
    return People(
        silos=tuple(regions),
        pid=column["pid"],
        silo=table["region"].cast(pl.Enum(regions)).to_physical().to_numpy().astype(np.int32),
        split=column["split"],
        group=np.zeros(len(table), np.int32),
        features=person_features(column["age"], column["sex"], column["hh_size"], seconds),
        infected=column["infected"].astype(np.int16),
        recovered=column["recovered"].astype(np.int16),
        target=column["target"].astype(np.int8),
    )


def sample_contacts(folder: Path, people: People) -> tuple[Pairs, np.ndarray]:
    """Returns each person's sampled contacts within the own region, and the number of different people met."""
    places = pl.LazyFrame({"pid": people.pid, "place": np.arange(len(people), dtype=np.int32), "silo": people.silo})
    contacts = (
        pl.scan_parquet(folder / "population_network.parquet")
        .join(places.rename({"pid": "pid1", "place": "first"}), on="pid1")
        .join(places.rename({"pid": "pid2", "place": "second"}), on="pid2")
        .filter(pl.col("silo") == pl.col("silo_right"))
    )
    ends = [
        contacts.select(
            pl.col(owner).alias("owner"),
            pl.col(other).alias("other"),
            "start_time",
            "duration",
            pl.lit(2, pl.UInt8).pow(pl.col(activity).cast(pl.UInt8) - 1).cast(pl.UInt8).alias("activity"),
        )
        for owner, other, activity in (("first", "second", "activity1"), ("second", "first", "activity2"))
    ]
    pairs = (
        pl.concat(ends)
        .group_by("owner", "other")
        .agg(
            pl.col("start_time").min(),
            pl.col("duration").sum(),
            pl.len().alias("count"),
            pl.col("activity").bitwise_or(),
        )
        .collect()
    )
    degrees = np.bincount(pairs["owner"].to_numpy(), minlength=len(people))
    owner, other = pairs["owner"].to_numpy(), pairs["other"].to_numpy()
    priority = keyed_uint64(SEED, "contacts", people.pid[owner], people.pid[other])
    sampled = (
        pairs.with_columns(pl.Series("priority", priority))
        .sort("owner", "priority", "other")
        .with_columns(pl.int_range(pl.len()).over("owner").alias("slot"))
        .filter(pl.col("slot") < NUM_SLOTS)
    )
    names = ("owner", "other", "slot", "start_time", "duration", "count", "activity")
    arrays = [sampled[name].to_numpy() for name in names]
    return Pairs(arrays[0].astype(np.int64), *arrays[1:]), degrees


def write_rows(path: Path, layout: RowLayout, people: People, pairs: Pairs, degrees: np.ndarray) -> None:
    """Writes rows for training, validation and tests, as Parquet without compression."""
    schema = pyarrow.schema(
        [
            ("pid", pyarrow.int64()),
            ("is_test", pyarrow.bool_()),
            ("x", pyarrow.binary(layout.size)),
            ("y", pyarrow.int8()),
        ]
    )
    choices = np.uint64(NUM_DAYS - PREDICTION_DAYS - WINDOW_DAYS + 1)
    with pyarrow.parquet.ParquetWriter(path, schema, compression="NONE", use_dictionary=False) as writer:
        for begin in range(0, len(people), _BLOCK):
            end = min(begin + _BLOCK, len(people))
            low, high = np.searchsorted(pairs.owner, [begin, end])
            own = Pairs(*(values[low:high] for values in pairs))
            own = own._replace(owner=own.owner - begin)
            pid, infected = people.pid[begin:end], people.infected[begin:end].astype(np.int64)
            window = keyed_uint64(SEED, "window", pid, np.zeros(len(pid), np.int64)) % choices
            for is_test, starts in (
                (False, WINDOW_DAYS + window.astype(np.int64)),
                (True, np.full(len(pid), NUM_DAYS, np.int64)),
            ):
                x = build_rows(layout, people, begin, degrees[begin:end], own, starts)
                label = (infected >= starts) & (infected < starts + PREDICTION_DAYS)
                y = people.target[begin:end] if is_test else label.astype(np.int8)
                values = pyarrow.FixedSizeBinaryArray.from_buffers(
                    pyarrow.binary(layout.size), len(x), [None, pyarrow.py_buffer(np.ascontiguousarray(x))]
                )
                flags = pyarrow.array(np.full(len(pid), is_test))
                batch = pyarrow.RecordBatch.from_arrays(
                    [pyarrow.array(pid), flags, values, pyarrow.array(y)], schema=schema
                )
                writer.write_batch(batch)


if __name__ == "__main__":
    main()
