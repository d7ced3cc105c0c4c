"""Settings are typed once; every fault is one line: source, key, what was found, what is allowed."""

import math
from typing import Annotated, Literal

import pytest
from msgspec import Meta, field

from tff_pdp.errors import ConfigError
from tff_pdp.settings import (
    Count,
    Delta,
    Epsilon,
    Finite,
    Fraction,
    Name,
    NotNegative,
    Positive,
    Settings,
    Share,
    join_key,
    parse_yaml,
    read_settings,
    read_yaml,
    settings_class,
    to_plain,
)


class Momentum(Settings):
    """A section in a section."""

    decay: Fraction = 0.9
    kind: Literal["plain", "nesterov"] = "plain"


class Fixed(Settings, tag_field="kind", tag="fixed"):
    """Of a kind."""

    norm: Positive


class Adaptive(Settings, tag_field="kind", tag="adaptive"):
    """Of another kind."""

    quantile: Share = 0.5


class Section(Settings):
    """Has a field of every type that configurations have; a required one may follow those with defaults."""

    rate: Positive = 0.1
    rounds: Count
    title: Name = "a"
    note: str | None = None
    code: Annotated[str, Meta(pattern="^[a-z]+$")] = "a"
    shape: Annotated[tuple[Count, ...], Meta(min_length=3, max_length=3)] = (1, 2, 3)
    sizes: tuple[Count, ...] = ()
    grid: Annotated[dict[str, tuple[float, ...]], Meta(min_length=1)] = field(default_factory=lambda: {"a": (1.0,)})
    limits: dict[str, NotNegative] = field(default_factory=dict)
    momentum: Momentum = Momentum()
    clip: Fixed | Adaptive | None = None
    runs: Literal["all", "few"] | Annotated[float, Meta(ge=0)] = "all"
    sets: Name | dict[str, Name] | None = None
    is_open: bool = False
    low: Finite = 0.0
    high: Finite = 1.0
    epsilon: Epsilon = math.inf
    delta: Delta = 1e-5
    seed: int | None = None

    def __post_init__(self):
        if self.low > self.high:
            raise ValueError(f"low {self.low:g} must not be above high {self.high:g}")


def read(content, key="section"):
    return read_settings(Section, content, "experiment.yaml", key)


def test_values_have_the_types_of_their_fields():
    content = {
        "rounds": 3,
        "rate": 2,
        "shape": [4, 5, 6],
        "grid": {"b": [1, 2.5]},
        "momentum": {"decay": 1},
        "clip": {"kind": "fixed", "norm": 1},
        "sets": {"a": "b"},
        "runs": 0,
        "epsilon": math.inf,
    }
    settings = read(content)
    assert settings == Section(
        rounds=3,
        rate=2.0,
        shape=(4, 5, 6),
        grid={"b": (1.0, 2.5)},
        momentum=Momentum(decay=1.0),
        clip=Fixed(norm=1.0),
        sets={"a": "b"},
        runs=0.0,
    )
    assert all(
        type(one) is float for one in (settings.rate, settings.momentum.decay, settings.clip.norm, settings.runs)
    )
    assert type(settings.grid["b"][0]) is float and type(settings.shape) is tuple
    assert read(to_plain(settings)) == settings
    assert to_plain(settings)["clip"] == {"kind": "fixed", "norm": 1.0} and to_plain(settings)["title"] == "a"
    with pytest.raises(AttributeError):
        settings.rounds = 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rounds": 0}, "section.rounds must be a whole number of at least 1, not 0"),
        ({"rounds": "3"}, "section.rounds must be a whole number of at least 1, not '3'"),
        ({"rounds": True}, "section.rounds must be a whole number of at least 1, not True"),
        ({"rounds": 2.5}, "section.rounds must be a whole number of at least 1, not 2.5"),
        ({"rounds": 2.0}, "section.rounds must be a whole number of at least 1, not 2.0"),
        ({"rounds": None}, "section.rounds must be a whole number of at least 1, not None"),
        ({"rate": 0}, "section.rate must be a number above 0, not 0"),
        ({"rate": "0.1"}, "section.rate must be a number above 0, not '0.1'"),
        ({"rate": True}, "section.rate must be a number above 0, not True"),
        ({"rate": math.nan}, "section.rate must be a number above 0, not nan"),
        ({"rate": math.inf}, "section.rate must be a number above 0, not inf"),
        ({"low": -math.inf}, "section.low must be a number that is finite, not -inf"),
        ({"low": math.nan}, "section.low must be a number that is finite, not nan"),
        ({"epsilon": 0}, "section.epsilon must be a number above 0, not 0"),
        ({"epsilon": math.nan}, "section.epsilon must be a number above 0, not nan"),
        ({"delta": 1}, "section.delta must be a number above 0 and below 1, not 1"),
        ({"seed": 0.5}, "section.seed must be a whole number, or nothing, not 0.5"),
        ({"title": ""}, "section.title must be text that is not empty, not ''"),
        ({"title": 3}, "section.title must be text that is not empty, not 3"),
        ({"note": 3}, "section.note must be text, or nothing, not 3"),
        ({"code": "a1"}, "section.code must be text like ^[a-z]+$, not 'a1'"),
        ({"is_open": 1}, "section.is_open must be true or false, not 1"),
        ({"is_open": "yes"}, "section.is_open must be true or false, not 'yes'"),
        ({"shape": [1, 2]}, "section.shape must be a list of 3, each a whole number of at least 1, not [1, 2]"),
        ({"shape": [1, 2, 0]}, "section.shape[2] must be a whole number of at least 1, not 0"),
        ({"shape": 3}, "section.shape must be a list of 3, each a whole number of at least 1, not 3"),
        ({"sizes": "12"}, "section.sizes must be a list, each a whole number of at least 1, not '12'"),
        ({"sizes": {"a": 1}}, "section.sizes must be a list, each a whole number of at least 1, not {'a': 1}"),
        ({"grid": {}}, "section.grid must be a mapping from names, at least 1, each to a list, each a number, not {}"),
        ({"grid": {"a": [1, "b"]}}, "section.grid.a[1] must be a number, not 'b'"),
        ({"limits": {"a": -1}}, "section.limits.a must be a number of at least 0, not -1"),
        ({"limits": [1]}, "section.limits must be a mapping from names, each to a number of at least 0, not [1]"),
        ({"momentum": {"decay": 2}}, "section.momentum.decay must be a number of at least 0 and at most 1, not 2"),
        ({"momentum": {"kind": "n"}}, "section.momentum.kind must be one of nesterov, plain, not 'n'"),
        ({"momentum": {"dekay": 1}}, "unknown key section.momentum.dekay; did you mean decay?"),
        ({"momentum": 3}, "section.momentum must be a mapping, not 3"),
        ({"momentum": None}, "section.momentum must be a mapping, not None"),
        ({"clip": {"norm": 1}}, "missing key section.clip.kind: one of fixed, adaptive"),
        ({"clip": {"kind": "fix"}}, "section.clip.kind must be one of fixed, adaptive, not 'fix'"),
        ({"clip": {"kind": ["fixed"]}}, "section.clip.kind must be one of fixed, adaptive, not ['fixed']"),
        ({"clip": {"kind": "fixed"}}, "missing key section.clip.norm: a number above 0"),
        ({"clip": {"kind": "fixed", "norm": 0}}, "section.clip.norm must be a number above 0, not 0"),
        ({"clip": {"kind": "adaptive", "norm": 1}}, "unknown key section.clip.norm; known: quantile"),
        ({"clip": 3}, "section.clip must be a mapping whose kind is one of fixed, adaptive, or nothing, not 3"),
        ({"runs": "some"}, "section.runs must be one of all, few, or a number of at least 0, not 'some'"),
        ({"runs": -1}, "section.runs must be one of all, few, or a number of at least 0, not -1"),
        ({"sets": {"a": ""}}, "section.sets.a must be text that is not empty, not ''"),
        (
            {"sets": 3},
            "section.sets must be text that is not empty, or a mapping from names, each to text that is not empty, or "
            "nothing, not 3",
        ),
        ({"low": 3}, "section: low 3 must not be above high 1"),
        ({"roundz": 3}, "unknown key section.roundz; did you mean rounds?"),
        ({"title": "x" * 100, "rounds": "y" * 100}, f"section.rounds must be a .* of at least 1, not '{'y' * 76}..."),
        ({"two\nlines": 1}, "unknown key section.two lines; known: clip, code, delta, epsilon, .*, title"),
    ],
)
def test_a_fault_is_one_line_with_the_key_what_was_found_and_what_is_allowed(changes, message):
    with pytest.raises(ConfigError) as caught:
        read({"rounds": 1, **changes})
    told = str(caught.value)
    head, _, tail = message.partition(".*")
    assert told.startswith(f"experiment.yaml: {head}") and told.endswith(tail)
    assert (told == f"experiment.yaml: {message}") or ".*" in message
    assert len(told.splitlines()) == 1


def test_missing_keys_are_named_with_what_they_take():
    with pytest.raises(
        ConfigError, match=r"^experiment.yaml: missing key section.rounds: a whole number of at least 1$"
    ):
        read({"rate": 0.5})
    with pytest.raises(ConfigError, match=r"^experiment.yaml: missing key rounds: a whole number of at least 1$"):
        read({}, key="")


@pytest.mark.parametrize("content", [None, [1], 3, "rounds"])
def test_what_is_no_mapping_at_all(content):
    with pytest.raises(ConfigError) as caught:
        read(content, key="")
    assert str(caught.value) == f"experiment.yaml: the file must be a mapping, not {content!r}"
    with pytest.raises(ConfigError) as caught:
        read(content)
    assert str(caught.value) == f"experiment.yaml: section must be a mapping, not {content!r}"


def test_rules_of_several_fields_name_the_section_or_nothing_where_there_is_none():
    with pytest.raises(ConfigError, match=r"^experiment.yaml: low 3 must not be above high 1$"):
        read({"rounds": 1, "low": 3}, key="")


def test_types_other_than_classes_are_read_the_same_way():
    assert read_settings(dict[str, Count], {"a": 1}, "--set x") == {"a": 1}
    with pytest.raises(ConfigError, match=r"^--set x: silos\.a must be a whole number of at least 1, not 0$"):
        read_settings(dict[str, Count], {"a": 0}, "--set x", "silos")
    assert read_settings(Fixed | Adaptive, {"kind": "adaptive"}, "a") == Adaptive(quantile=0.5)


def test_classes_made_of_fields_have_types_defaults_and_what_they_inherit():
    made = settings_class("Made", {"rounds": Count, "scale": Positive}, {"scale": 2.0}, Momentum)
    assert issubclass(made, Momentum) and made.__name__ == "Made"
    assert to_plain(read_settings(made, {"rounds": 1}, "a")) == {
        "decay": 0.9,
        "kind": "plain",
        "rounds": 1,
        "scale": 2.0,
    }
    with pytest.raises(ConfigError, match="a: missing key rounds: a whole number of at least 1"):
        read_settings(made, {}, "a")
    with pytest.raises(ConfigError, match="a: scale must be a number above 0, not 0"):
        read_settings(made, {"rounds": 1, "scale": 0}, "a")


def test_keys_are_joined():
    assert join_key("", "a") == "a" and join_key("a.b", 3) == "a.b.3"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-1", 0.1),
        ("1E5", 1e5),
        ("1.5e+3", 1500.0),
        (".5", 0.5),
        ("5.", 5.0),
        ("-0.25", -0.25),
        ("3", 3),
        ("-3", -3),
        ("+3", 3),
        ("017", 17),
        ("0o17", 15),
        ("0x1F", 31),
        (".inf", math.inf),
        ("-.INF", -math.inf),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        # Of YAML 1.1 alone.
        ("yes", "yes"),
        ("no", "no"),
        ("on", "on"),
        ("Off", "Off"),
        ("y", "y"),
        ("1_000", "1_000"),
        ("0b11", "0b11"),
        ("12:30:45", "12:30:45"),
        ("2026-01-31", "2026-01-31"),
        ("1e", "1e"),
        ("e5", "e5"),
        (".", "."),
        ("'1e-1'", "1e-1"),
        ("'true'", "true"),
        ('"null"', "null"),
    ],
)
def test_scalars_are_those_of_yaml_1_2(text, value):
    found = parse_yaml(f"a: {text}\n", "experiment.yaml")["a"]
    assert found == value and type(found) is type(value)
    assert parse_yaml(f"[{text or '~'}]", "experiment.yaml") == [value]


def test_not_a_number_is_one():
    assert math.isnan(parse_yaml(".nan", "experiment.yaml"))


def test_keys_are_text_as_they_are_written():
    text = "{7: a, 007: b, 7.0: c, true: d, null: e, no: f, '8': g, 1e3: {2: h}}"
    assert parse_yaml(text, "experiment.yaml") == {
        "7": "a",
        "007": "b",
        "7.0": "c",
        "true": "d",
        "null": "e",
        "no": "f",
        "8": "g",
        "1e3": {"2": "h"},
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", "the key 'a' occurs more than once .*line 3, column 1"),
        ("a: {b: 1, c: {d: 1, d: 1}}", "the key 'd' occurs more than once"),
        ("[{a: 1, a: 1}]", "the key 'a' occurs more than once"),
        ("{7: 1, '7': 2}", "the key '7' occurs more than once"),
        ("? [a]\n: b\n", "a key must be plain text"),
        ("? {a: b}\n: b\n", "a key must be plain text"),
        ("a: [1", "expected ',' or ']'"),
        ("a: 1\n---\nb: 2\n", "expected a single document"),
        ("a: !!python/object/apply:os.getcwd []", "could not determine a constructor"),
        ("a: *b", "undefined alias"),
        ("\x00", "special characters are not allowed"),
        pytest.param("a: " + "9" * 5000, "Exceeds the limit", id="a number of 5000 digits"),
        pytest.param("[" * 1500, "nested too deeply", id="1500 lists"),
    ],
)
def test_what_is_no_yaml_is_one_line_that_names_the_source(text, message):
    with pytest.raises(ConfigError, match=rf"^experiment\.yaml: not valid YAML: .*{message}") as caught:
        parse_yaml(text, "experiment.yaml")
    assert len(str(caught.value).splitlines()) == 1


def test_own_keys_replace_merged_ones():
    text = """
base: &base {rounds: 1, rate: 2}
more: &more {<<: *base, rate: 3}
most: {<<: *more, rounds: 4, title: a}
"""
    assert parse_yaml(text, "experiment.yaml") == {
        "base": {"rounds": 1, "rate": 2},
        "more": {"rounds": 1, "rate": 3},
        "most": {"rounds": 4, "rate": 3, "title": "a"},
    }
    with pytest.raises(ConfigError, match="the key 'rate' occurs more than once"):
        parse_yaml("a: &a {b: 1}\nc: {<<: *a, rate: 2, rate: 3}\n", "experiment.yaml")


def test_files_that_cannot_be_read_are_named(tmp_path):
    path = tmp_path / "experiment.yaml"
    with pytest.raises(ConfigError, match=r"experiment\.yaml: cannot read the file \(No such file or directory\)"):
        read_yaml(path)
    with pytest.raises(ConfigError, match=r"cannot read the file \(Is a directory\)"):
        read_yaml(tmp_path)
    path.write_bytes(b"ab: \xff")
    with pytest.raises(ConfigError, match=r"experiment\.yaml: not UTF-8 text \(byte 4\)"):
        read_yaml(path)
    path.write_text("a: [1")
    with pytest.raises(ConfigError, match=r"experiment\.yaml: not valid YAML"):
        read_yaml(path)
    path.write_text("a: é\n", encoding="utf-8")
    assert read_yaml(str(path)) == {"a": "é"}
