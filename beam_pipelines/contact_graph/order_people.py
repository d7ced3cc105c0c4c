"""The last of the stages about people: everybody in the order of the rows they become, for all tasks to look into."""

import dataclasses
from collections.abc import Iterable

import numpy as np

from beam_pipelines.contact_graph.exchange import gather
from beam_pipelines.contact_graph.people import People
from beam_pipelines.contact_graph.people_rules import SILO_NAMES, PeopleRules
from beam_pipelines.contact_graph.person_features import PERSON_FEATURES
from beam_pipelines.dataset.accounting import count_dropped, count_kept, count_read, count_rows
from beam_pipelines.keyed_hash import keyed_uint64
from beam_pipelines.records import Reason
from beam_pipelines.stages import Piece, TaskContext
from tff_pdp.data.manifest import SPLITS

ORDER = "order_people"


@dataclasses.dataclass(frozen=True)
class OrderPeople:
    """Everybody -> `People` in the staging folder, for all tasks to look into."""

    rules: PeopleRules

    def __call__(self, task: int, context: TaskContext) -> Iterable[Piece]:
        """Writes everybody, counted and checked."""
        rows = gather(
            context,
            "people",
            {"pid": np.int64, "silo": np.int64, "group": np.int64, "infected": np.int16, "recovered": np.int16}
            | {"target": np.int8}
            | dict.fromkeys(PERSON_FEATURES, np.uint8),
        )
        names = self._silo_names(context)
        ids, silo = np.unique(rows["silo"], return_inverse=True)
        # In the order of their names, as clients are everywhere.
        by_name = sorted(ids.tolist(), key=lambda number: names[number])
        rank = {number: place for place, number in enumerate(by_name)}
        silo = np.array([rank[number] for number in ids.tolist()], np.int64)[silo]
        sizes = np.bincount(silo, minlength=len(ids))
        is_large = sizes >= self.rules.min_people
        self._count(silo, is_large, rows["target"], context)
        keep = is_large[silo]
        silo = (np.cumsum(is_large) - 1)[silo[keep]].astype(np.int32)
        rows = {name: values[keep] for name, values in rows.items()}
        split = self._splits(rows["pid"])
        order = np.lexsort((rows["pid"], split, silo))
        _, group, group_sizes = np.unique(rows["group"], return_inverse=True, return_counts=True)
        self.rules.degree_bound.check_groups(group_sizes)
        People(
            silos=tuple(names[number] for number, large in zip(by_name, is_large.tolist(), strict=True) if large),
            pid=rows["pid"][order],
            silo=silo[order],
            split=split[order],
            group=group[order].astype(np.int32),
            features=np.stack([rows[name] for name in PERSON_FEATURES], axis=1)[order],
            infected=rows["infected"][order],
            recovered=rows["recovered"][order],
            target=rows["target"][order],
        ).save(context.folder)
        return ()

    def _silo_names(self, context: TaskContext) -> dict[int, str]:
        rows = gather(context, SILO_NAMES, {"id": np.int64, "name": object})
        return dict(zip(rows["id"].tolist(), rows["name"].tolist(), strict=True))

    def _count(self, silo: np.ndarray, is_large: np.ndarray, target: np.ndarray, context: TaskContext) -> None:
        """Counts silos, people, and the rows that they should have; those of large silos are kept when written."""
        is_lost = ~is_large[silo]
        num_lost = int(is_lost.sum())
        rows = len(silo) * self.rules.num_windows + int((target >= 0).sum())
        lost_rows = num_lost * self.rules.num_windows + int((target[is_lost] >= 0).sum())
        count_read(context, users=len(is_large), examples=rows)
        count_kept(context, users=int(is_large.sum()), examples=0)
        count_dropped(context, Reason.TOO_FEW_EXAMPLES, users=int((~is_large).sum()), examples=lost_rows)
        count_rows(context, "person", "kept", len(silo) - num_lost)
        count_rows(context, "person", Reason.TOO_FEW_EXAMPLES, num_lost)

    def _splits(self, pids: np.ndarray) -> np.ndarray:
        limit = np.uint64(self.rules.validation_fraction * 2.0**64)
        is_validation = keyed_uint64(self.rules.seed, "split", pids) < limit
        return np.where(is_validation, SPLITS.index("validation"), SPLITS.index("train")).astype(np.int8)
