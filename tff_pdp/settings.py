"""Reads settings from YAML into typed values, and checks their ranges.

A `Settings` class is a section of a configuration, or the options of a command. Its fields have types and ranges, and
its docstring explains the fields. Every error is one line with the file, the key, the value and the allowed values.
"""

import difflib
import re
import sys
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import new_class
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import yaml
from msgspec import Meta
from msgspec import inspect as types

from tff_pdp.errors import ConfigError

# Experiments that come with the package, and the files of published ones.
CONFIGS = Path(__file__).parent / "configs"

T = TypeVar("T")
S = TypeVar("S", bound="Settings")

_MOST = sys.float_info.max
Finite = Annotated[float, Meta(ge=-_MOST, le=_MOST)]
Positive = Annotated[float, Meta(gt=0, le=_MOST)]
NotNegative = Annotated[float, Meta(ge=0, le=_MOST)]
# Infinite where no privacy is asked for.
Epsilon = Annotated[float, Meta(gt=0)]
Delta = Annotated[float, Meta(gt=0, lt=1)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
# Inside of (0, 1).
Share = Annotated[float, Meta(gt=0, lt=1)]
Count = Annotated[int, Meta(ge=1)]
CountOrZero = Annotated[int, Meta(ge=0)]
Name = Annotated[str, Meta(min_length=1)]
# Ways to compute clients that an experiment can ask for.
ClientParallelism = Literal["auto", "loop", "vectorized"]
# Devices on which XLA compiles the work of stacked clients: a GPU, all, or none.
Xla = Literal["auto", "always", "never"]


@typing.dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(msgspec.field,))
class _FieldsByName(msgspec.StructMeta):
    """Makes fields of all subclasses keyword-only, so that required ones may follow those with defaults."""

    def __new__(mcls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **options: Any) -> type:
        return super().__new__(mcls, name, bases, namespace, **{"kw_only": True, **options})


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, metaclass=_FieldsByName):
    """Settings of one section: fields with type, range and default; unknown keys are refused.

    A subclass explains its fields under `Attributes:`. Rules on several fields are checked in `__post_init__`, which
    raises a ValueError; the user sees the section's key, followed by the text of that error.
    """


def settings_class(name: str, fields: Mapping[str, Any], defaults: Mapping[str, Any], base: type[S]) -> type[S]:
    """Builds a subclass of `base`; `fields` has types by field, `defaults` has the values of optional fields."""
    content = {"__annotations__": dict(fields), "__module__": __name__, **defaults}
    return typing.cast(type[S], new_class(name, (base,), {}, lambda namespace: namespace.update(content)))


class _Yaml(yaml.SafeLoader):
    """Reads YAML by the core schema of YAML 1.2: 1e-1 is a number, yes is text.

    Keys stay text as written, since names of silos may be keys: 007 stays 007. A repeated key is refused: it may be a
    silo's budget, and YAML would silently keep the last value.
    """

    yaml_implicit_resolvers: typing.ClassVar[dict[str, Any]] = {}

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Reads a mapping; raises MarkedYAMLError if a key occurs twice or is not plain text."""
        node = super().compose_mapping_node(anchor)
        keys = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(None, None, "a key must be plain text", key.start_mark)
            if key.value in keys:
                message = f"the key {key.value!r} occurs more than once"
                raise yaml.MarkedYAMLError(None, None, message, key.start_mark)
            keys.add(key.value)
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Builds a mapping; keys written in the mapping replace keys merged by `<<`."""
        # Puts merged ones first.
        self.flatten_mapping(node)
        return {key.value: self.construct_object(value, deep=deep) for key, value in node.value}

    def construct_integer(self, node: yaml.ScalarNode) -> int:
        """Reads a decimal, hexadecimal (0x) or octal (0o) number."""
        base = {"0x": 16, "0o": 8}.get(node.value[:2])
        return int(node.value[2:], base) if base else int(node.value)


for _tag, _pattern, _beginnings in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
    ("merge", "<<", ["<"]),
):
    _Yaml.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"(?:{_pattern})$"), _beginnings)
_Yaml.add_constructor("tag:yaml.org,2002:int", _Yaml.construct_integer)


def read_yaml(path: str | Path) -> Any:
    """Reads a YAML file as plain data.

    Raises:
      ConfigError: the file cannot be read, is not YAML, or repeats a key.
    """
    try:
        return parse_yaml(Path(path).read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the file ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start})") from None


def parse_yaml(text: str, source: str) -> Any:
    """Reads YAML as plain data; error messages begin with `source`.

    Raises:
      ConfigError: the text is not YAML, or repeats a key.

    >>> parse_yaml("{learning_rate: 3e-1, silos: {007: 1}, resume: no}", "example")
    {'learning_rate': 0.3, 'silos': {'007': 1}, 'resume': 'no'}
    """
    try:
        return yaml.load(text, _Yaml)
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{source}: not valid YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ConfigError(f"{source}: not valid YAML: nested too deeply") from None


@typing.overload
def read_settings(kind: type[T], content: Any, source: str, key: str = "") -> T: ...


@typing.overload
def read_settings(kind: Any, content: Any, source: str, key: str = "") -> Any: ...


def read_settings(kind: Any, content: Any, source: str, key: str = "") -> Any:
    """Converts plain data to a `Settings` class, or to any type that is allowed for a field of a `Settings` class.

    Args:
      kind: class or type to convert to.
      content: plain data as read from YAML: mappings, lists, numbers and text.
      source: name of the content's source, a file or an option of a command, with which error messages begin.
      key: dotted key of the content within the source; empty if the content is the whole source.

    Raises:
      ConfigError: a key is unknown or missing, or a value has a wrong type or lies outside of its range.

    >>> class Clip(Settings):
    ...     clip_norm: Positive = 1.0
    >>> read_settings(Clip, {"clip_norm": 2}, "example.yaml")
    Clip(clip_norm=2.0)
    >>> read_settings(Clip, {"clip_norm": -1}, "example.yaml", "privacy")
    Traceback (most recent call last):
    tff_pdp.errors.ConfigError: example.yaml: privacy.clip_norm must be a number above 0, not -1
    >>> read_settings(Clip, {"clipnorm": 1}, "example.yaml", "privacy")
    Traceback (most recent call last):
    tff_pdp.errors.ConfigError: example.yaml: unknown key privacy.clipnorm; did you mean clip_norm?
    """
    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        fault = _first_fault(kind, content, key) or f"{key or 'the file'}: {_cause(error)}"
        # Text that is quoted may have lines.
        raise ConfigError(f"{source}: {' '.join(fault.splitlines())}") from None


def to_plain(settings: Settings) -> dict[str, Any]:
    """Converts settings to plain data for JSON or YAML, including settings that have their defaults."""
    return msgspec.to_builtins(settings)


def join_key(key: str, name: object) -> str:
    """Appends a name to a dotted key.

    >>> join_key("privacy", "clip_norm"), join_key("", "privacy")
    ('privacy.clip_norm', 'privacy')
    """
    return f"{key}.{name}" if key else str(name)


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Suggests the known name that is closest to an unknown name, or lists all known names.

    >>> did_you_mean("clipnorm", ["clip_norm", "budgets"]), did_you_mean("x", ["clip_norm", "budgets"])
    ('did you mean clip_norm?', 'known: budgets, clip_norm')
    """
    names = sorted(known)
    close = difflib.get_close_matches(str(name), names, 1)
    return f"did you mean {close[0]}?" if close else f"known: {', '.join(names) or 'none'}"


def _first_fault(hint: Any, value: Any, key: str) -> str | None:
    """Describes the first value that does not fit its type; None if all values fit."""
    bare = typing.cast(Any, hint).__origin__ if typing.get_origin(hint) is Annotated else hint
    info, inner = types.type_info(hint), typing.get_args(bare)
    if isinstance(info, types.StructType) and isinstance(value, Mapping):
        return _fault_of_struct(info, value, key)
    if isinstance(info, types.UnionType) and isinstance(value, Mapping):
        return _fault_of_union(inner, value, key)
    if isinstance(info, types.DictType) and isinstance(value, Mapping):
        faults = (_first_fault(inner[1], one, join_key(key, name)) for name, one in value.items())
    elif isinstance(info, types.VarTupleType) and isinstance(value, list | tuple):
        faults = (_first_fault(inner[0], one, f"{key}[{place}]") for place, one in enumerate(value))
    else:
        faults = ()
    if found := next(filter(None, faults), None):
        return found
    try:
        msgspec.convert(value, hint)
    except msgspec.ValidationError:
        return _must_be(key, [hint], value)
    return None


def _must_be(key: str, options: Iterable[Any], value: Any) -> str:
    shown = repr(value)
    shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
    wanted = ", or ".join(words_of_type(types.type_info(one)) for one in options)
    return f"{key or 'the file'} must be {wanted}, not {shown}"


def _fault_of_union(options: Iterable[Any], value: Mapping[str, Any], key: str) -> str | None:
    """Does as `_first_fault`, for a mapping that may be one of several classes, told apart by their tags."""
    infos = [types.type_info(one) for one in options]
    tagged = {str(one.tag): one for one in infos if isinstance(one, types.StructType) and one.tag_field}
    if not tagged:
        mappings = [one for one in options if isinstance(types.type_info(one), types.StructType | types.DictType)]
        return _first_fault(mappings[0], value, key) if mappings else _must_be(key, options, value)
    field = next(iter(tagged.values())).tag_field or "kind"
    if field not in value:
        return f"missing key {join_key(key, field)}: one of {', '.join(tagged)}"
    if str(value[field]) not in tagged:
        return f"{join_key(key, field)} must be one of {', '.join(tagged)}, not {value[field]!r}"
    return _fault_of_struct(tagged[str(value[field])], value, key)


def _fault_of_struct(info: types.StructType, value: Mapping[str, Any], key: str) -> str | None:
    fields = {field.encode_name: field for field in info.fields}
    hints = typing.get_type_hints(info.cls, include_extras=True)
    if info.tag_field and info.tag_field in value and value[info.tag_field] != info.tag:
        return f"{join_key(key, info.tag_field)} must be {info.tag}, not {value[info.tag_field]!r}"
    for name in value:
        if name not in fields and name != info.tag_field:
            return f"unknown key {join_key(key, name)}; {did_you_mean(name, fields)}"
    for name, field in fields.items():
        if name in value:
            if fault := _first_fault(hints[name], value[name], join_key(key, name)):
                return fault
        elif field.required:
            return f"missing key {join_key(key, name)}: {words_of_type(field.type)}"
    try:
        msgspec.convert(value, info.cls)
    except msgspec.ValidationError as error:
        return f"{key}: {_cause(error)}" if key else _cause(error)
    return None


def _cause(error: msgspec.ValidationError) -> str:
    """Returns the error's text without the path; messages have the key instead."""
    return re.sub(r" - at `.*`$", "", str(error))


def words_of_type(info: types.Type) -> str:
    """Describes in words the values that a field of a type accepts.

    >>> words_of_type(types.type_info(Count)), words_of_type(types.type_info(Positive | None))
    ('a whole number of at least 1', 'a number above 0, or nothing')
    """
    if isinstance(info, types.UnionType):
        some = [one for one in info.types if not isinstance(one, types.NoneType)]
        tags = [str(one.tag) for one in some if isinstance(one, types.StructType) and one.tag is not None]
        words = [words_of_type(one) for one in some if getattr(one, "tag", None) is None]
        words += [f"a mapping whose kind is one of {', '.join(tags)}"] if tags else []
        return ", or ".join(words + ["nothing"] * (len(some) < len(info.types)))
    if isinstance(info, types.LiteralType):
        values = [str(value) for value in info.values]
        return f"one of {', '.join(values)}" if len(values) > 1 else values[0]
    if isinstance(info, types.VarTupleType | types.ListType):
        each = "" if isinstance(info.item_type, types.AnyType) else f", each {words_of_type(info.item_type)}"
        return f"a list{_words_of_length(info)}{each}"
    if isinstance(info, types.StructType):
        return "a mapping"
    if isinstance(info, types.DictType):
        least = f", at least {info.min_length}," if info.min_length else ""
        options = words_of_type(info.value_type).replace("a whole number, or a number", "a number").split(", or ")
        if len(options) > 1:
            return f"a mapping from names{least} to values ({', '.join(options)})"
        return f"a mapping from names{least or ','} each to {options[0]}"
    if isinstance(info, types.BoolType):
        return "true or false"
    if isinstance(info, types.StrType):
        like = f" like {info.pattern}" if info.pattern else ""
        return "text that is not empty" if info.min_length else f"text{like}"
    if isinstance(info, types.IntType | types.FloatType):
        return ("a whole number" if isinstance(info, types.IntType) else "a number") + _words_of_range(info)
    return "anything"


def _words_of_length(info: types.VarTupleType | types.ListType) -> str:
    low, high = info.min_length, info.max_length
    if low is not None and low == high:
        return f" of {low}"
    return f" of at least {low}" if low else ""


def _words_of_range(info: types.IntType | types.FloatType) -> str:
    bounds = {"above": info.gt, "of at least": info.ge, "below": info.lt, "at most": info.le}
    told = [f"{words} {bound:g}" for words, bound in bounds.items() if bound not in (None, -_MOST, _MOST)]
    if not told:
        return " that is finite" if info.le == _MOST else ""
    return f" {' and '.join(told)}"
