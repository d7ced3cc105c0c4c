"""Reads the `budgets` part of a configuration into one (epsilon, delta) for each silo: who may spend how much.

Budgets are drawn from a distribution, as the papers on personalised budgets do, or given silo by silo: in the
configuration itself, or in a CSV or YAML file of their own.
"""

import csv
import dataclasses
import hashlib
import io
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from statistics import NormalDist
from typing import Any

import yaml

from tff_pdp.errors import ConfigError
from tff_pdp.settings import number, open_unit_delta, positive_epsilon, positive_number, require_keys

_KEY = "privacy.budgets.distribution"

# From two numbers uniform in (0, 1) to an epsilon.
_Quantile = Callable[[float, float], float]


def draw_epsilons(config: Any, client_ids: Collection[str]) -> dict[str, float]:
    """Draws an epsilon for every silo, from the seed and the silo's name alone: never from data or from other silos.

    A silo keeps its epsilon when others join or leave. The draws are independent and the same on every machine.

    Args:
      config: `{kind: normal_mixture, components: [{share: .., mean: .., stddev: ..}, ..], minimum: .., seed: ..}`,
        where the shares sum to 1 and draws below `minimum` count as `minimum`; or
        `{kind: log_uniform, low: .., high: .., seed: ..}`. The seed is 0 where none is given.
      client_ids: every silo that takes part.

    Raises:
      ConfigError: naming the key that is unknown, missing or out of range.

    Source: Liu et al., "Projected federated averaging with heterogeneous differential privacy", VLDB 2021: mixtures of
    Gaussians, for example nine silos in ten around 0.5 and one around 10.

    >>> spread = {"kind": "log_uniform", "low": 0.5, "high": 8, "seed": 0}
    >>> {silo: round(epsilon, 3) for silo, epsilon in draw_epsilons(spread, ["a", "b"]).items()}
    {'a': 2.766, 'b': 5.665}
    >>> draw_epsilons(spread, ["b"])["b"] == draw_epsilons(spread, ["a", "b"])["b"]
    True
    """
    kind = config.get("kind") if isinstance(config, Mapping) else None
    if kind not in _KINDS:
        raise ConfigError(f"{_KEY} is {config!r}; it must be a mapping whose `kind` is {' or '.join(_KINDS)}.")
    quantile = _KINDS[kind](config)
    seed = config.get("seed", 0)
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise ConfigError(f"{_KEY}.seed is {seed!r}; it must be a whole number.")
    return {name: quantile(*_uniforms(seed, name)) for name in sorted(client_ids)}


def _uniforms(seed: int, name: str) -> tuple[float, float]:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    # 52 bits and a half: exact in float64, and never 0 or 1.
    first, second = (((int.from_bytes(digest[at : at + 8]) >> 12) + 0.5) / 2**52 for at in (0, 8))
    return first, second


def _log_uniform(config: Mapping[str, Any]) -> _Quantile:
    require_keys(_KEY, config, ["kind", "low", "high"], ["seed"])
    low, high = (positive_number(f"{_KEY}.{name}", config[name]) for name in ("low", "high"))
    if not low < high:
        raise ConfigError(f"{_KEY}.low is {low:g}, which is not below {_KEY}.high, {high:g}.")
    return lambda first, _: low * math.exp(first * math.log(high / low))


def _normal_mixture(config: Mapping[str, Any]) -> _Quantile:
    require_keys(_KEY, config, ["kind", "components", "minimum"], ["seed"])
    minimum = positive_number(f"{_KEY}.minimum", config["minimum"])
    given = config["components"]
    if not isinstance(given, list | tuple) or not given:
        raise ConfigError(f"{_KEY}.components is {given!r}; it must be a list of {{share, mean, stddev}}.")
    components = [_component(f"{_KEY}.components[{position}]", each) for position, each in enumerate(given)]
    total = math.fsum(share for share, _ in components)
    if not math.isclose(total, 1, abs_tol=1e-6):
        raise ConfigError(f"{_KEY}.components have shares that sum to {total:g}; they must sum to 1.")

    def quantile(first: float, second: float) -> float:
        chosen, below = components[-1][1], 0.0
        for share, normal in components:
            below += share
            if first < below:
                chosen = normal
                break
        return max(minimum, chosen.inv_cdf(second))

    return quantile


def _component(key: str, config: Any) -> tuple[float, NormalDist]:
    require_keys(key, config, ["share", "mean", "stddev"])
    mean = number(f"{key}.mean", config["mean"])
    if not math.isfinite(mean):
        raise ConfigError(f"{key}.mean is {config['mean']!r}; it must be finite.")
    share, stddev = (positive_number(f"{key}.{name}", config[name]) for name in ("share", "stddev"))
    return share, NormalDist(mean, stddev)


_KINDS: dict[str, Callable[[Mapping[str, Any]], _Quantile]] = {
    "normal_mixture": _normal_mixture,
    "log_uniform": _log_uniform,
}


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


_FORMS = (
    "Use one of: `{epsilon: 4.0, delta: 1e-4}` for all silos; "
    "`{delta: 1e-4, silos: {silo_a: 1.0, silo_b: {epsilon: 2.0, delta: 1e-5}}, default_epsilon: 4.0}`; "
    "`{delta: 1e-4, file: budgets.csv}`, of silo,epsilon[,delta], or a YAML file of the same; "
    "`{delta: 1e-4, cycle: [1, 2, 4, 8]}`, assigned in sorted order of the silo names; "
    "`{delta: 1e-4, distribution: {kind: log_uniform, low: 0.5, high: 8, seed: 0}}`."
)
_KEYS_OF_FORM = {
    "epsilon": {"epsilon"},
    "silos": {"silos", "default_epsilon"},
    "file": {"file", "default_epsilon"},
    "cycle": {"cycle"},
    "distribution": {"distribution"},
}


@dataclasses.dataclass(frozen=True)
class SiloBudget:
    """What one scope may spend over a whole run.

    Attributes:
      epsilon: upper limit of the privacy loss, positive; infinite means that no privacy is asked for.
      delta: share of bad luck accepted, in (0, 1); choose it well below 1 / number of records of the silo.
    """

    epsilon: float
    delta: float

    def __post_init__(self):
        positive_epsilon("epsilon", self.epsilon)
        open_unit_delta("delta", self.delta)


def parse_budgets(config: Mapping[str, Any], client_ids: Collection[str]) -> dict[str, SiloBudget]:
    """Reads the budgets of all silos from a configuration mapping.

    Args:
      config: one of the forms in the example below, or `{delta: .., file: ..}`, for whose files see
        `tff_pdp.privacy.accounting.budgets`; distributions are described in `tff_pdp.privacy.accounting.budgets`.
        `delta` may be left out where every silo is given one of its own.
      client_ids: every silo that takes part.

    Returns:
      The budget by silo, in sorted order.

    Raises:
      ConfigError: naming the key, or the file and its line: it is unknown, missing or out of range, or names a silo
        that does not exist.

    >>> parse_budgets({"epsilon": 4.0, "delta": 1e-4}, ["b", "a"])
    {'a': SiloBudget(epsilon=4.0, delta=0.0001), 'b': SiloBudget(epsilon=4.0, delta=0.0001)}
    >>> [b.epsilon for b in parse_budgets({"delta": 1e-4, "cycle": [1, 2]}, ["a", "b", "c"]).values()]
    [1.0, 2.0, 1.0]
    >>> parse_budgets({"delta": 1e-4, "silos": {"a": 1}, "default_epsilon": 4}, ["a", "b"])["b"].epsilon
    4.0
    >>> parse_budgets({"silos": {"a": {"epsilon": 1, "delta": 1e-5}}}, ["a"])
    {'a': SiloBudget(epsilon=1.0, delta=1e-05)}
    >>> drawn = {"kind": "log_uniform", "low": 0.5, "high": 8, "seed": 0}
    >>> 0.5 < parse_budgets({"delta": 1e-4, "distribution": drawn}, ["a"])["a"].epsilon < 8
    True
    """
    form = _form(config)
    names = sorted(client_ids)
    delta = open_unit_delta("privacy.budgets.delta", config["delta"]) if "delta" in config else None
    if form == "epsilon":
        epsilon = positive_epsilon("privacy.budgets.epsilon", config["epsilon"])
        entries = _without_own_delta(dict.fromkeys(names, epsilon))
    elif form == "cycle":
        entries = _without_own_delta(_cycled(config["cycle"], names))
    elif form == "distribution":
        entries = _without_own_delta(draw_epsilons(config["distribution"], names))
    else:
        entries = _given_by_name(config, form, names)
    return {name: _budget(name, entries[name], delta) for name in names}


def _form(config: Mapping[str, Any]) -> str:
    forms = [form for form in _KEYS_OF_FORM if form in config]
    if "default_epsilon" in config and not forms:
        forms = ["silos"]
    if len(forms) != 1:
        listed = [f"`{form}`" for form in forms or _KEYS_OF_FORM]
        found = f"none of {', '.join(listed[:-1])} and {listed[-1]}" if not forms else " and ".join(listed)
        raise ConfigError(f"privacy.budgets has {found}; exactly one is needed. {_FORMS}")
    unknown = sorted(str(key) for key in set(config) - _KEYS_OF_FORM[forms[0]] - {"delta"})
    if unknown:
        raise ConfigError(f"privacy.budgets has the unknown key `{unknown[0]}`. {_FORMS}")
    return forms[0]


def _without_own_delta(epsilons: Mapping[str, float]) -> dict[str, BudgetEntry]:
    return {name: BudgetEntry("privacy.budgets", epsilon) for name, epsilon in epsilons.items()}


def _cycled(cycle: Any, names: list[str]) -> dict[str, float]:
    if not isinstance(cycle, list | tuple) or not cycle:
        raise ConfigError(f"privacy.budgets.cycle is {cycle!r}; it must be a list of epsilons, such as [1, 2, 4, 8].")
    values = [positive_epsilon(f"privacy.budgets.cycle[{position}]", value) for position, value in enumerate(cycle)]
    return {name: values[position % len(values)] for position, name in enumerate(names)}


def _given_by_name(config: Mapping[str, Any], form: str, names: list[str]) -> dict[str, BudgetEntry]:
    if form == "file":
        if not isinstance(config["file"], str) or not config["file"]:
            raise ConfigError(f"privacy.budgets.file is {config['file']!r}; it must be the path of a file.")
        source, given = config["file"], read_budget_file(config["file"])
    else:
        source, given = "privacy.budgets.silos", mapping_entries("privacy.budgets.silos", config.get("silos", {}))
    strangers = sorted(set(given) - set(names))
    if strangers:
        known = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
        raise ConfigError(f"{given[strangers[0]].place} names no silo of this data set (it has {known}).")
    default = None
    if "default_epsilon" in config:
        key = "privacy.budgets.default_epsilon"
        default = BudgetEntry(key, positive_epsilon(key, config["default_epsilon"]))
    missing = sorted(set(names) - set(given))
    if not missing:
        return given
    if default is None:
        raise ConfigError(
            f"{source} has no epsilon for {len(missing)} silos, for example {missing[0]}. "
            "Add them, or set privacy.budgets.default_epsilon."
        )
    return dict.fromkeys(missing, default) | given


def _budget(name: str, entry: BudgetEntry, common_delta: float | None) -> SiloBudget:
    delta = common_delta if entry.delta is None else entry.delta
    if delta is None:
        raise ConfigError(f"privacy.budgets.delta is missing, and silo {name!r} has no delta of its own. {_FORMS}")
    return SiloBudget(entry.epsilon, delta)
