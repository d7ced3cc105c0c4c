"""From a file of contacts to rows: what is promised for one pair's contacts holds for those that are imported."""

import numpy as np
import pytest

from beam_pipelines.epidemic.socio_patterns import ImportOptions, import_contacts
from tests.beam_pipelines.contact_graph.graph_support import (
    job_of,
    name_by_hand,
    options_of,
    read_rows,
    run_in_memory,
)

PEOPLE, DAY = 12, 86_400
# A ring on the first day: everybody meets two others, so that there are slots left.
RING = [(20 * (1 + step), 1 + pid, 1 + (pid + 1) % PEOPLE) for pid in range(PEOPLE) for step in range(pid + 1)]
STATES = "day,pid,state\n" + "".join(f"{day},3,I\n" for day in range(20, 57))


@pytest.mark.parametrize("meeting", [(40, 1, 7), (2 * DAY + 3620, 1, 7)], ids=["same day", "another day"])
def test_a_meeting_changes_the_rows_of_two_people(tmp_path, meeting):
    before, bound = rows_of_contacts(tmp_path / "before", RING)
    after, _ = rows_of_contacts(tmp_path / "after", [*RING, meeting])
    assert before.keys() == after.keys() == set(range(1, PEOPLE + 1))
    assert {pid for pid in before if before[pid] != after[pid]} == {1, 7} and bound == 2


def test_durations_are_means_over_the_observed_days(tmp_path):
    found = []
    for days in (1, 3):
        rows, _ = rows_of_contacts(tmp_path / str(days), RING, observed_days=days)
        found.append(np.array([np.frombuffer(rows[pid].x, np.uint8) for pid in sorted(rows)]))
    assert (found[0] != found[1]).any(axis=1).all()


def rows_of_contacts(folder, contacts, observed_days=3):
    """The training row of each person, and how many of them a pair can change."""
    folder.mkdir()
    (folder / "tij.dat").write_text("".join(f"{time} {first} {second}\n" for time, first, second in contacts))
    (folder / "metadata.dat").write_text("".join(f"{pid}\tward\tF\n" for pid in range(1, PEOPLE + 1)))
    source = folder / "input"
    import_contacts(folder / "tij.dat", folder / "metadata.dat", source, ImportOptions(observed_days=observed_days))
    (source / "disease_outcome_training.csv").write_text(STATES)
    job = job_of(options_of(source, folder, num_slots=5, validation_fraction=0))
    run_in_memory(job.stages, folder / "staging")
    rows = read_rows(folder / "staging", job)
    assert job.row_influence is not None
    return {pid: rows[name_by_hand(0, "row", pid, 0)] for pid in range(1, PEOPLE + 1)}, job.row_influence.num_rows
