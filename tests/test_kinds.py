"""Kinds by name: our own, those of installed packages, and `module:name`; and what functions take as settings."""

import hashlib
import importlib
import sys
import textwrap
from collections.abc import Sequence

import pytest

from tff_pdp.errors import ConfigError
from tff_pdp.experiment.kinds import ALGORITHMS, MODELS, PLANS, SOURCES
from tff_pdp.kinds import Kinds, meanings, settings_of
from tff_pdp.settings import Count, Positive, Settings, read_settings, to_plain

GROUP = "tff_pdp.kinds_of_tests"


class Square:
    """A kind of our own."""


NOT_A_KIND = 3
KINDS: Kinds[type] = Kinds("shape.kind", {"square": f"{__name__}:Square", "gone": "tff_pdp.errors:Gone"}, GROUP)
MODULE = """
from tff_pdp.settings import Settings

class Round(Settings):
    radius: float

class Square(Settings):
    pass
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """The file of a module outside of any package, which can be imported."""
    path = tmp_path / "shapes_of_a_user.py"
    path.write_text(textwrap.dedent(MODULE))
    monkeypatch.syspath_prepend(tmp_path)
    yield path
    sys.modules.pop("shapes_of_a_user", None)


@pytest.fixture
def installed(module):
    """The same as an installed package, which names two kinds."""
    info = module.parent / "shapes_of_a_user-1.2.3.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shapes-of-a-user\nVersion: 1.2.3\n")
    (info / "top_level.txt").write_text("shapes_of_a_user\n")
    names = "round = shapes_of_a_user:Round\nsquare = shapes_of_a_user:Square\n"
    (info / "entry_points.txt").write_text(f"[{GROUP}]\n{names}")
    importlib.invalidate_caches()
    return module


def test_our_own_have_no_origin():
    assert KINDS.find("square") is Square
    assert KINDS.origin("square") is None


def test_a_module_outside_is_named_with_the_digest_of_its_file(module):
    found = KINDS.find("shapes_of_a_user:Round")
    assert issubclass(found, Settings) and found.__name__ == "Round"
    digest = hashlib.sha256(module.read_bytes()).hexdigest()
    assert KINDS.origin("shapes_of_a_user:Round") == f"shapes_of_a_user:Round, SHA-256 {digest[:16]}"


def test_an_installed_package_is_named_with_its_version(installed):
    assert KINDS.find("round").__name__ == "Round"
    origin = KINDS.origin("round")
    digest = hashlib.sha256(installed.read_bytes()).hexdigest()
    assert origin == f"shapes_of_a_user:Round, version 1.2.3, SHA-256 {digest[:16]}"
    assert KINDS.origin("shapes_of_a_user:Round") == origin
    # What a package calls like one of ours does not take its place.
    assert KINDS.find("square") is Square and KINDS.origin("square") is None
    with pytest.raises(ConfigError, match=r"^shape\.kind: unknown kind 'ruond'; did you mean round\?$"):
        KINDS.find("ruond")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("sqare", r"unknown kind 'sqare'; did you mean square\?"),
        ("", "unknown kind ''; known: gone, square"),
        ("triangle", "unknown kind 'triangle'; known: gone, square"),
        ("gone", "the module tff_pdp.errors has no class or function 'Gone'"),
        (f"{__name__}:Gone", f"the module {__name__} has no class or function 'Gone'"),
        (f"{__name__}:NOT_A_KIND", f"the module {__name__} has no class or function 'NOT_A_KIND'"),
        ("no_such_module:Round", r"cannot import no_such_module:Round \(No module named 'no_such_module'\)"),
        ("tff_pdp.errors.deeper:Round", "cannot import tff_pdp.errors.deeper:Round .*not a package"),
        (":Round", "':Round' must have the form module:name"),
        ("tff_pdp.errors:", "'tff_pdp.errors:' must have the form module:name"),
        (".errors:Round", "'.errors:Round' must have the form module:name"),
        ("a:b:c", "'a:b:c' must have the form module:name"),
        ("C:/shapes.py", "'C:/shapes.py' must have the form module:name"),
    ],
)
def test_kinds_that_cannot_be_found(kind, message):
    for look_up in (KINDS.find, KINDS.origin):
        if look_up == KINDS.origin and kind == "gone":
            continue
        with pytest.raises(ConfigError, match=rf"^shape\.kind: {message}") as caught:
            look_up(kind)
        assert len(str(caught.value).splitlines()) == 1


def test_a_module_whose_own_imports_fail_says_which(module):
    module.write_text("import no_such_module\n")
    with pytest.raises(ConfigError, match=r"cannot import shapes_of_a_user:Round \(No module named 'no_such_module'\)"):
        KINDS.find("shapes_of_a_user:Round")


@pytest.mark.parametrize("kinds", [SOURCES, PLANS, MODELS, ALGORITHMS], ids=["data", "privacy", "model", "algorithms"])
def test_everything_of_our_own_is_there_and_says_what_it_takes(kinds):
    assert len({one.group for one in (SOURCES, PLANS, MODELS, ALGORITHMS)}) == 4
    for kind in kinds.own:
        found = kinds.find(kind)
        settings = found
        if not isinstance(found, type):
            settings = settings_of(found, ("input_shape", "num_classes", "num_clients", "rounds", "head"))
        assert issubclass(settings, Settings) and settings.__doc__
        # Functions that differ from another by a name say so, and not once more what they take.
        assert found is not settings or set(settings.__struct_fields__) <= meanings(settings).keys()


def build_shape(size: tuple[int, ...], /, rounds: int, *, radius: Positive, sides: Count = 4, name: str = "a") -> None:
    """Builds a shape.

    Args:
      size: given by the caller.
      rounds: too.
      radius: of the circle
        around it.
      sides: how many: at least one.
      name: what it is called.

    Raises:
      ConfigError: never.
    """


def test_settings_of_a_function_are_its_parameters():
    settings = settings_of(build_shape, ("size", "rounds"))
    assert settings.__struct_fields__ == ("radius", "sides", "name") and settings.__doc__ == build_shape.__doc__
    assert settings is settings_of(build_shape, ("size", "rounds"))
    read = read_settings(settings, {"radius": 1}, "experiment.yaml", "shape")
    assert to_plain(read) == {"radius": 1.0, "sides": 4, "name": "a"}
    for content, message in (
        ({}, "missing key shape.radius: a number above 0"),
        ({"radius": 0}, "shape.radius must be a number above 0, not 0"),
        ({"radius": 1, "sides": 0}, "shape.sides must be a whole number of at least 1, not 0"),
        ({"radius": 1, "rounds": 3}, "unknown key shape.rounds; known: name, radius, sides"),
        ({"radius": 1, "sidez": 3}, r"unknown key shape.sidez; did you mean sides\?"),
    ):
        with pytest.raises(ConfigError, match=rf"^experiment\.yaml: {message}"):
            read_settings(settings, content, "experiment.yaml", "shape")


def test_a_parameter_without_a_type_cannot_be_set():
    def build(*, radius):
        return radius

    with pytest.raises(ConfigError, match=r"test_kinds:.*build: the parameter radius has no annotation"):
        settings_of(build)
    assert settings_of(build, ("radius",)).__struct_fields__ == ()


def test_settings_of_a_function_without_any():
    def build(head: Sequence[str]) -> None:
        del head

    assert to_plain(read_settings(settings_of(build, ("head",)), {}, "a")) == {}


def test_meanings_are_those_of_the_docstring():
    assert meanings(build_shape) == {
        "size": "given by the caller.",
        "rounds": "too.",
        "radius": "of the circle around it.",
        "sides": "how many: at least one.",
        "name": "what it is called.",
    }


class Base(Settings):
    """A base.

    Attributes:
      kind: of it.
      size: of it, with a list:
        one: of the entry's own text.
    """

    kind: str
    size: int


class Derived(Base):
    """Adds to it.

    Attributes:
      size: another one.
      colour: of it.

    And more text.
    """

    colour: str


def test_meanings_of_a_class_have_those_of_what_it_inherits_from():
    assert meanings(Derived) == {"kind": "of it.", "size": "another one.", "colour": "of it."}
    assert meanings(Base)["size"] == "of it, with a list: one: of the entry's own text."
    assert meanings(Square) == {}
