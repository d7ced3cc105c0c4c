"""Finds the class or function that a `kind` names, in this package or outside of it, and its settings."""

import ast
import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import re
import sys
import typing
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar

from tff_pdp.errors import ConfigError
from tff_pdp.settings import Settings, did_you_mean, settings_class

T = TypeVar("T")


class Kinds(Generic[T]):
    """Finds the class or function for a `kind`: a name from this or another installed package, or `module:name`.

    Args:
      key: dotted key of the kind, for error messages.
      own: this package's kinds: `module:name` by kind, imported only if the kind is used.
      group: group of entry points in which other installed packages name their kinds.
      lines: one line on each of this package's kinds, by kind; by default the first sentence of its docstring.
    """

    def __init__(self, key: str, own: Mapping[str, str], group: str, lines: Mapping[str, str] | None = None):
        self.key, self.own, self.group, self._lines = key, own, group, lines or {}

    def find(self, kind: str) -> T:
        """Returns the class or function that a kind names.

        Raises:
          ConfigError: the kind is not known, or its module cannot be imported or has no such class or function.
        """
        path = self._path(kind)
        module, _, name = path.partition(":")
        if not all(part.isidentifier() for part in (*module.split("."), name)):
            raise ConfigError(f"{self.key}: {path!r} must have the form module:name")
        try:
            found = getattr(importlib.import_module(module), name, None)
        except ImportError as error:
            raise ConfigError(f"{self.key}: cannot import {path} ({error})") from None
        if not callable(found):
            raise ConfigError(f"{self.key}: the module {module} has no class or function {name!r}")
        return typing.cast(T, found)

    def origin(self, kind: str) -> str | None:
        """Returns the origin of a kind: module, version and hash of the module's file; None for a kind of this package.

        Raises ConfigError, as in `find`.
        """
        if kind in self.own:
            return None
        self.find(kind)
        path = self._path(kind)
        module = sys.modules[path.partition(":")[0]]
        package = importlib.metadata.packages_distributions().get(module.__name__.partition(".")[0])
        version = f", version {importlib.metadata.version(package[0])}" if package else ""
        file = getattr(module, "__file__", None)
        return f"{path}{version}, SHA-256 {hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16] if file else ''}"

    def described(self) -> dict[str, str]:
        """Returns one line on each kind of this and of other installed packages; imports no module of a kind."""
        paths = {**self._installed(), **self.own}
        return {kind: self._lines.get(kind) or _first_sentence(path) for kind, path in paths.items()}

    def _installed(self) -> dict[str, str]:
        return {one.name: one.value for one in importlib.metadata.entry_points(group=self.group)}

    def _path(self, kind: str) -> str:
        if kind in self.own:
            return self.own[kind]
        installed = self._installed()
        if kind in installed or ":" in kind:
            return installed.get(kind, kind)
        raise ConfigError(f"{self.key}: unknown kind {kind!r}; {did_you_mean(kind, [*self.own, *installed])}")


def _first_sentence(path: str) -> str:
    """Returns the first sentence of a docstring, from the module's text; empty if there is none."""
    module, _, name = path.partition(":")
    try:
        # Imports the packages that the module is in.
        found = importlib.util.find_spec(module)
        tree = ast.parse(Path(found.origin).read_text(encoding="utf-8") if found and found.origin else "")
    except (ImportError, OSError, SyntaxError, UnicodeDecodeError):
        return ""
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            paragraph = (ast.get_docstring(node) or "").partition("\n\n")[0]
            return re.split(r"(?<=\.)\s(?=[A-Z])", " ".join(paragraph.split()))[0]
    return ""


@cache
def settings_of(function: Callable[..., Any], given: tuple[str, ...] = ()) -> type[Settings]:
    """Builds a `Settings` class from a function's parameters: their annotations, defaults and descriptions.

    Args:
      function: function that will be called with the settings.
      given: names of parameters that are no settings, because the caller passes values for them.

    Raises:
      ConfigError: a parameter has no annotation.
    """
    hints = typing.get_type_hints(function, include_extras=True)
    parameters = {
        name: parameter for name, parameter in inspect.signature(function).parameters.items() if name not in given
    }
    for name in parameters:
        if name not in hints:
            raise ConfigError(f"{function.__module__}:{function.__qualname__}: the parameter {name} has no annotation")
    defaults = {name: one.default for name, one in parameters.items() if one.default is not inspect.Parameter.empty}
    made = settings_class(function.__name__, {name: hints[name] for name in parameters}, defaults, Settings)
    made.__doc__ = function.__doc__
    return made


_ENTRY = re.compile(r"^(\s+)(\w+): (.*)$")


def meanings(owner: Any) -> dict[str, str]:
    """Returns descriptions by field name, from the docstring of a class (and its bases) or of a function.

    The descriptions are in the section `Attributes:` or `Args:`.
    """
    found: dict[str, str] = {}
    for one in reversed(inspect.getmro(owner)) if inspect.isclass(owner) else [owner]:
        lines = inspect.cleandoc(one.__doc__ or "").splitlines()
        starts = [place for place, line in enumerate(lines) if line in ("Attributes:", "Args:")]
        indent = name = None
        for line in lines[starts[0] + 1 :] if starts else []:
            if line and not line.startswith(" "):
                break
            entry = _ENTRY.match(line)
            if entry and indent in (None, entry[1]):
                indent, name, found[entry[2]] = entry[1], entry[2], entry[3]
            elif name and line.strip():
                found[name] += " " + line.strip()
    return found
