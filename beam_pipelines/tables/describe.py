"""Describes tables before they are prepared: clients, labels, ranges of columns, rows that cannot be used."""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from beam_pipelines.records import Unusable
from beam_pipelines.tables.columns import Category, Classes, Integer, Number, Tokens
from beam_pipelines.tables.files import client_of
from beam_pipelines.tables.rows import Rows, missing_columns, read_rows
from beam_pipelines.tables.survey import Seen, TableSchema, look_at
from beam_pipelines.tables.users import NOBODY


@dataclasses.dataclass
class Described:
    """Content of tables.

    Attributes:
      sizes: number of usable rows of each client.
      labels: number of usable rows of each class; empty for a regression.
      labels_of: the same for each client.
      rows_read: number of all rows, usable or not.
      problems: number of rows, or whole files, that cannot be used, by reason.
      first: description of the first record with each reason.
      columns: kind, allowed values and range of each column.
    """

    sizes: Counter[str] = dataclasses.field(default_factory=Counter)
    labels: Counter[str] = dataclasses.field(default_factory=Counter)
    labels_of: dict[str, Counter[str]] = dataclasses.field(default_factory=dict)
    rows_read: int = 0
    problems: Counter[str] = dataclasses.field(default_factory=Counter)
    first: dict[str, str] = dataclasses.field(default_factory=dict)
    columns: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)

    def note(self, client: str, source: str, problem: Unusable) -> None:
        """Counts a problem, and keeps the description of the first of its kind."""
        self.problems[problem.reason.value] += 1
        allowed = f"; allowed: {problem.allowed}" if problem.allowed else ""
        self.first.setdefault(problem.reason.value, f"{source}, client {client!r}: {problem.found}{allowed}")


def describe_tables(folder: Path, names: Sequence[str], schema: TableSchema) -> Described:
    """Reads all rows of tables, and describes the clients, labels, columns and problems.

    Args:
      folder: folder of the tables.
      names: names of the tables.
      schema: the complete schema.

    Raises:
      DataError: a table cannot be read.
    """
    found = Described()
    whole = []
    for name in names:
        client = client_of(Path(name)) if schema.roles.client is None else ""
        if problem := missing_columns(folder / name, schema):
            found.note(client, name, problem)
            found.sizes[client] += 0
            continue
        whole.append(name)
        if client:
            found.sizes[client] += 0
        for rows in read_rows(folder / name, schema):
            _add(found, rows, client, name, schema)
    kinds = dict(schema.features)
    if schema.roles.label is not None and schema.label is not None:
        kinds[schema.roles.label] = schema.label
    seen = look_at(folder, whole, list(kinds), kinds)
    found.columns = {name: _column(kinds[name], seen[name]) for name in kinds}
    return found


def _add(found: Described, rows: Rows, client: str, source: str, schema: TableSchema) -> None:
    found.rows_read += len(rows)
    of_rows = [client] * len(rows) if rows.clients is None else [one or NOBODY for one in rows.clients]
    for place, problem in sorted(rows.problems.items()):
        found.note(of_rows[place], source, problem)
    is_usable = np.ones(len(rows), bool)
    is_usable[list(rows.problems)] = False
    clients = np.array(of_rows, object)
    for one in dict.fromkeys(of_rows):
        is_own = is_usable & (clients == one)
        found.sizes[one] += int(is_own.sum())
        if schema.class_names is not None:
            counts = np.bincount(rows.y[is_own].astype(np.int64), minlength=len(schema.class_names))
            by_name = Counter(dict(zip(schema.class_names, counts.tolist(), strict=True)))
            found.labels.update(by_name)
            found.labels_of.setdefault(one, Counter()).update(by_name)


def _column(kind: Any, seen: Seen) -> dict[str, Any]:
    told: dict[str, Any] = {"kind": type(kind).__struct_config__.tag, "allowed": kind.words}
    if isinstance(kind, Number | Integer) and np.isfinite(seen.low):
        told |= {"smallest": seen.low, "largest": seen.high}
    if isinstance(kind, Category | Classes):
        told |= {"values": dict(seen.texts.most_common())}
    if isinstance(kind, Tokens):
        told |= {"longest": seen.longest}
    if seen.missing:
        told["missing"] = seen.missing
    return told


def content_of(found: Described, schema: TableSchema, min_examples: int) -> dict[str, Any]:
    """Returns a description as JSON values; clients with fewer usable rows than `min_examples` would be left out."""
    small = {client: size for client, size in sorted(found.sizes.items()) if size < min_examples and client != NOBODY}
    kept = [size for client, size in found.sizes.items() if client not in small and client != NOBODY]
    lacking = {
        client: [name for name in schema.class_names or () if not counts[name]]
        for client, counts in sorted(found.labels_of.items())
        if client not in small and client != NOBODY
    }
    return {
        "clients": len(kept),
        "examples": sum(kept),
        "examples_of_a_client": {"smallest": min(kept, default=0), "largest": max(kept, default=0)},
        "rows_read": found.rows_read,
        "values_of_an_example": schema.num_values,
        "label": schema.roles.label,
        "classes": dict(found.labels),
        "columns": found.columns,
        "left_out_clients": small,
        "clients_without_some_classes": {client: names for client, names in lacking.items() if names},
        "dead_letters": {
            reason: {"records": number, "first": found.first[reason]} for reason, number in found.problems.most_common()
        },
        "treated_as_public": list(schema.treated_as_public),
    }


# Number of entries of a list that is printed; JSON has all.
_SHOWN = 10


def text_of(content: Mapping[str, Any]) -> str:
    """Returns the content of a description as lines of text."""
    sizes = content["examples_of_a_client"]
    lines = [
        f"clients   {content['clients']}, with {sizes['smallest']} to {sizes['largest']} examples each",
        f"examples  {content['examples']} of {content['rows_read']} rows, of {content['values_of_an_example']} values",
    ]
    if content["classes"]:
        lines.append(f"classes   {_joined([f'{name} {number}' for name, number in content['classes'].items()])}")
    lines.append("columns")
    for name, told in content["columns"].items():
        span = f", seen {told['smallest']:g} to {told['largest']:g}" if "smallest" in told else ""
        missing = f", {told['missing']} missing" if "missing" in told else ""
        mark = " (label)" if name == content["label"] else ""
        lines.append(f"  {name}{mark}: {told['kind']}, {told['allowed']}{span}{missing}")
    if content["left_out_clients"]:
        small = [f"{client} ({size} examples)" for client, size in content["left_out_clients"].items()]
        lines.append(f"left out  {len(small)} clients with too few examples: {_joined(small)}")
    if lacking := content["clients_without_some_classes"]:
        told = [f"{client} ({', '.join(names)})" for client, names in lacking.items()]
        lines.append(f"absent    {len(told)} clients lack classes: {_joined(told)}")
    for reason, letter in content["dead_letters"].items():
        lines.append(f"unusable  {letter['records']} ({reason}), first {letter['first']}")
    for constant in content["treated_as_public"]:
        lines.append(f"public    taken from the data, not declared: {constant}")
    return "\n".join(lines)


def _joined(entries: Sequence[str]) -> str:
    more = f" and {len(entries) - _SHOWN} more" if len(entries) > _SHOWN else ""
    return f"{', '.join(entries[:_SHOWN])}{more}"
