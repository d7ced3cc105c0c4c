"""Budgets given silo by silo: in the configuration itself, or in a CSV or YAML file of their own."""

import csv
import dataclasses
import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from tff_pdp.errors import ConfigError
from tff_pdp.settings import open_unit_delta, positive_epsilon, require_keys

_HEADERS = (["silo", "epsilon"], ["silo", "epsilon", "delta"])


@dataclasses.dataclass(frozen=True)
class BudgetEntry:
    """One silo's budget as it was given.

    Attributes:
      place: where, for error messages: a key of the configuration, or a file and its line.
      epsilon: positive, perhaps infinite.
      delta: in (0, 1), or None where none was given for this silo.
    """

    place: str
    epsilon: float
    delta: float | None = None


def mapping_entries(key: str, mapping: Any) -> dict[str, BudgetEntry]:
    """Reads `silo: epsilon` and `silo: {epsilon: .., delta: ..}` from a configuration, by silo.

    Raises:
      ConfigError: naming the key: it is no mapping, or a number is missing or out of range.
    """
    if not isinstance(mapping, Mapping):
        raise ConfigError(f"{key} is {mapping!r}; it must map silo names to epsilons.")
    # YAML reads an unquoted 7 as a number, while silo names are always text.
    return _by_silo((str(name), f"{key}.{name}", value) for name, value in mapping.items())


def read_budget_file(path: str | Path) -> dict[str, BudgetEntry]:
    """Reads a file of budgets, by silo.

    Args:
      path: a `.csv` file with the header `silo,epsilon` or `silo,epsilon,delta`, where a cell of delta may be empty;
        or a `.yaml` or `.yml` file that maps silos to epsilons, or to `{epsilon: .., delta: ..}`. UTF-8. Relative to
        the working directory.

    Raises:
      ConfigError: naming the file, and the line where there is one: the file cannot be read, is of neither form, has a
        silo more than once, or a number that is missing or out of range.
    """
    path = Path(path)
    readers = {".csv": _csv_rows, ".yaml": _yaml_rows, ".yml": _yaml_rows}
    if path.suffix.lower() not in readers:
        raise ConfigError(f"{path}: a file of budgets must end in .csv, .yaml or .yml.")
    try:
        # Spreadsheets put a byte order mark before the header.
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the file of budgets ({error.strerror}).") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start}).") from None
    return _by_silo(readers[path.suffix.lower()](path, text))


def _by_silo(rows: Iterator[tuple[str, str, Any]]) -> dict[str, BudgetEntry]:
    entries: dict[str, BudgetEntry] = {}
    for name, place, value in rows:
        if name in entries:
            raise ConfigError(f"{place}: silo {name!r} has a budget already, at {entries[name].place}.")
        if isinstance(value, Mapping):
            require_keys(place, value, ["epsilon"], ["delta"])
            epsilon = positive_epsilon(f"{place}.epsilon", value["epsilon"])
            delta = open_unit_delta(f"{place}.delta", value["delta"]) if "delta" in value else None
            entries[name] = BudgetEntry(place, epsilon, delta)
        else:
            entries[name] = BudgetEntry(place, positive_epsilon(place, value))
    return entries


def _csv_rows(path: Path, text: str) -> Iterator[tuple[str, str, Any]]:
    lines = csv.reader(io.StringIO(text, newline=""), strict=True)
    header: list[str] | None = None
    try:
        for cells in lines:
            cells = [cell.strip() for cell in cells]
            if not any(cells):
                continue
            if header is None:
                header = cells
                if header not in _HEADERS:
                    raise ConfigError(
                        f"{path}, line {lines.line_num}: the header is {','.join(header)!r}; it must be "
                        "'silo,epsilon' or 'silo,epsilon,delta'."
                    )
                continue
            if len(cells) != len(header) or not cells[0]:
                raise ConfigError(
                    f"{path}, line {lines.line_num}: {','.join(cells)!r} does not have one value for each of "
                    f"{', '.join(header)}."
                )
            row = dict(zip(header, cells, strict=True))
            name = row.pop("silo")
            if not row.get("delta", "given"):
                del row["delta"]
            yield name, f"{path}, line {lines.line_num}: {name}", row
    except csv.Error as error:
        raise ConfigError(f"{path}, line {lines.line_num}: not valid CSV: {error}.") from None
    if header is None:
        raise ConfigError(f"{path}: the file is empty; its first line must be 'silo,epsilon' or 'silo,epsilon,delta'.")


def _yaml_rows(path: Path, text: str) -> Iterator[tuple[str, str, Any]]:
    # By nodes: they know their lines, keep a repeated key, and a name such as 007 as it is written.
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        if not isinstance(root, yaml.MappingNode):
            raise ConfigError(f"{path}: the file must map silo names to epsilons.")
        for key, value in root.value:
            line = f"{path}, line {key.start_mark.line + 1}"
            if not isinstance(key, yaml.ScalarNode):
                raise ConfigError(f"{line}: the name of a silo must be plain text.")
            place = f"{line}: {key.value}"
            if isinstance(value, yaml.MappingNode):
                inner = [str(inner_key.value) for inner_key, _ in value.value]
                repeated = [name for name in inner if inner.count(name) > 1]
                if repeated:
                    raise ConfigError(f"{place}.{repeated[0]} occurs more than once.")
            yield key.value, place, loader.construct_object(value, deep=True)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
