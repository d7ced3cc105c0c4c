"""Describes all keys of a configuration: as JSON Schema for editors, and as a page for readers."""

import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import inspect as types

from tff_pdp.algorithms.hyper_parameters import HParam
from tff_pdp.algorithms.phases import ADAPTATION, reads_records_by_itself
from tff_pdp.experiment.config import ExperimentConfig
from tff_pdp.experiment.hparams import FROM_EXPERIMENT, build_algorithm
from tff_pdp.experiment.kinds import ALGORITHMS, LOSSES, METRICS, MODELS, PLANS, SOURCES, TRACKERS
from tff_pdp.experiment.model import SHAPES
from tff_pdp.kinds import meanings, settings_of
from tff_pdp.settings import Settings, words_of_type

Classes = dict[str, type[Settings]]
# Key, type, default and meaning.
Row = tuple[str, str, str, str]

_HEAD = """# Configuration

An experiment is a YAML file with the sections below. `tff-pdp config --reference` writes this page, and
`tff-pdp config --schema` the same as JSON Schema, from the classes that read a configuration.

Numbers are read as in YAML 1.2, so `1e-3` is a number. Unknown keys are refused. `kind` is one of the names here, a
name that an installed package gives by an entry point, or `module:name`.
"""
_ADAPTATION_HEAD = """## `algorithms`, with `privacy.synthetic`

Hyper-parameters of the rounds on records, which every method has that can train on synthetic data.
"""
# A class or function from outside of this package.
_OUTSIDE = {"type": "object", "properties": {"kind": {"type": "string", "pattern": ":"}}, "required": ["kind"]}
# Any experiment will do: hyper-parameters and their defaults are the same for all.
_CLIENTS, _ROUNDS, _HEAD_WEIGHTS = 2, 10, ("head/kernel", "head/bias")


def kinds_by_section() -> dict[str, Classes]:
    """Returns the settings class of each kind, by section and then by kind; imports TensorFlow."""
    return {
        "data": {kind: SOURCES.find(kind) for kind in SOURCES.own},
        "model": {kind: settings_of(MODELS.find(kind), SHAPES) for kind in MODELS.own},
        "privacy": {kind: PLANS.find(kind) for kind in PLANS.own},
        "algorithms": {kind: settings_of(ALGORITHMS.find(kind), FROM_EXPERIMENT) for kind in ALGORITHMS.own},
    }


def trackers() -> Classes:
    """Returns the settings class of each kind of tracker."""
    return {kind: settings_of(TRACKERS.find(kind)) for kind in TRACKERS.own}


def hyper_parameters(kind: str) -> dict[str, HParam]:
    """Returns, by name, the hyper-parameters that a configuration may set for a method; `kind` names the method."""
    algorithm, values = build_algorithm(kind, {}, num_clients=_CLIENTS, rounds=_ROUNDS, head=_HEAD_WEIGHTS)
    return {name: algorithm.hparams[name] for name in values}


def adaptation(kind: str) -> Mapping[str, HParam]:
    """Returns the hyper-parameters that a method also has with `privacy.synthetic`; none if the method refuses this."""
    algorithm, _ = build_algorithm(kind, {}, num_clients=_CLIENTS, rounds=_ROUNDS, head=_HEAD_WEIGHTS)
    return {} if reads_records_by_itself(algorithm) else ADAPTATION


def schema() -> dict[str, Any]:
    """Returns the JSON Schema of a configuration, with one alternative for each kind of a section."""
    sections = kinds_by_section()
    (whole,), components = msgspec.json.schema_components([ExperimentConfig], ref_template="#/$defs/{name}")
    defs: dict[str, Any] = dict(components)
    properties = defs["ExperimentConfig"]["properties"]
    for section, classes in sections.items():
        options = []
        for kind, own in classes.items():
            (_,), found = msgspec.json.schema_components([own], ref_template=f"#/$defs/{section}.{kind}.{{name}}")
            defs |= {f"{section}.{kind}.{name}": content for name, content in found.items()}
            content = defs[f"{section}.{kind}.{own.__name__}"]
            if section == "algorithms":
                declared = {**hyper_parameters(kind), **adaptation(kind)}
                values = {name: {**one.schema, "default": one.default} for name, one in declared.items()}
                content["properties"] = {**values, **content["properties"]}
            if section == "model":
                content["properties"] = {**_of_every_model(), **content["properties"]}
            required = [name for name in content.get("required", []) if name != "kind"]
            content["properties"] = {**content["properties"], "kind": {"const": kind}}
            content["required"] = required if section == "algorithms" else ["kind", *required]
            options.append({"$ref": f"#/$defs/{section}.{kind}.{own.__name__}"})
        one = {"anyOf": [*options, _OUTSIDE]}
        properties[section] = {"type": "object", "additionalProperties": one} if section == "algorithms" else one
    options = []
    for kind, own in trackers().items():
        (_,), found = msgspec.json.schema_components([own], ref_template="#/$defs/training.trackers.{name}")
        content = found[own.__name__]
        content["properties"] = {**content["properties"], "kind": {"const": kind}}
        content["required"] = ["kind", *content.get("required", [])]
        defs[f"training.trackers.{kind}"] = content
        options.append({"$ref": f"#/$defs/training.trackers.{kind}"})
    defs["Training"]["properties"]["trackers"]["items"] = {"anyOf": [*options, _OUTSIDE]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **whole, "$defs": defs}


def _of_every_model() -> dict[str, Any]:
    """Returns the JSON Schema of the keys that every kind of a model has."""
    chosen = {
        name: {"anyOf": [{"enum": [*kinds.own]}, {"type": "string", "pattern": ":"}, {"type": "object"}]}
        for name, kinds in (("loss", LOSSES), ("metric", METRICS))
    }
    return {"seed": {"type": "integer", "minimum": 0, "default": 0}, **chosen}


def reference() -> str:
    """Returns the page docs/configuration.md."""
    sections = kinds_by_section()
    lines = [_HEAD, *_heading("The file", ExperimentConfig), *_table(_rows(ExperimentConfig))]
    fields = {field.name: field for field in types.type_info(ExperimentConfig).fields}  # pyright: ignore
    shown: set[type] = set()
    for name, field in fields.items():
        if name not in sections:
            for own in _classes_in(field.type):
                lines += _with_inner(name, f"`{name}`", own, shown)
            if name == "training":
                for kind, own in trackers().items():
                    lines += _with_inner(name, f"`training.trackers`, kind `{kind}`", own, shown)
            continue
        every = [set(_rows(own)) for own in sections[name].values()]
        common = [row for row in _rows(next(iter(sections[name].values()))) if all(row in rows for rows in every)]
        if common:
            lines += [f"## `{name}`, every kind\n", *_table(common)]
        if name == "algorithms":
            lines += [_ADAPTATION_HEAD, *_table([_row_of_hparam(one, told) for one, told in ADAPTATION.items()])]
        for kind, own in sections[name].items():
            values = hyper_parameters(kind) if name == "algorithms" else {}
            extra = [_row_of_hparam(one, declared) for one, declared in values.items()]
            lines += _with_inner(name, f"`{name}`, kind `{kind}`", own, shown, common, extra)
    return "\n".join(lines).rstrip() + "\n"


def _with_inner(
    key: str, title: str, own: type, shown: set[type], common: Sequence[Row] = (), extra: Sequence[Row] = ()
) -> Iterator[str]:
    """Yields the table of a class without common rows, and the tables of classes in its fields not shown yet."""
    yield from _heading(title, own)
    yield from _table([row for row in _rows(own) if row not in common] + list(extra))
    for field in types.type_info(own).fields:  # pyright: ignore
        for inner in _classes_in(field.type):
            if inner not in shown:
                shown.add(inner)
                tag = types.type_info(inner).tag  # pyright: ignore
                place = f"{key}.{field.encode_name}"
                yield from _with_inner(place, f"`{place}`" + (f", kind `{tag}`" if tag else ""), inner, shown)


def _heading(title: str, own: type) -> Iterator[str]:
    yield f"## {title}\n"
    yield " ".join(inspect.cleandoc(own.__doc__ or "").partition("\n\n")[0].split()) + "\n"


def _rows(own: type) -> list[Row]:
    """Returns key, type, default and meaning of a class's fields, without the kind."""
    told = meanings(own)
    return [
        (field.encode_name, words_of_type(field.type), _default(field), told.get(field.name, ""))
        for field in types.type_info(own).fields  # pyright: ignore
        if field.encode_name != "kind"
    ]


def _row_of_hparam(name: str, declared: HParam) -> Row:
    means = [declared.meaning, declared.symbol, declared.unit and f"in {declared.unit}"]
    return name, declared.words, f"`{json.dumps(declared.default)}`", ", ".join(filter(None, means)) + "."


def _table(rows: Sequence[Row]) -> Iterator[str]:
    if rows:
        yield "| key | is | default | means |\n| --- | --- | --- | --- |"
        for name, *cells in rows:
            yield f"| `{name}` | {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"
        yield ""


def _default(field: types.Field) -> str:
    if field.required:
        return "required"
    value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()  # pyright: ignore
    if value is None:
        return "none"
    return f"`{json.dumps(msgspec.to_builtins(value), ensure_ascii=False)}`"


def _classes_in(info: types.Type) -> list[type]:
    match info:
        case types.StructType():
            return [info.cls]
        case types.UnionType():
            return [own for one in info.types for own in _classes_in(one)]
        case types.VarTupleType() | types.ListType():
            return _classes_in(info.item_type)
        case types.DictType():
            return _classes_in(info.value_type)
    return []
