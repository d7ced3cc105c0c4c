"""Builds commands from settings classes: options and help, one-line errors, results as text or JSON, exit status.

The fields of a `Command` define options with types, ranges and defaults; the docstring is the help text.
"""

import argparse
import contextlib
import dataclasses
import difflib
import gc
import importlib
import inspect
import itertools
import json
import re
import sys
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, NoReturn

import msgspec
from msgspec import inspect as types

from tff_pdp.errors import ConfigError, UserError, sentence_for_user
from tff_pdp.kinds import meanings
from tff_pdp.settings import Settings, did_you_mean, parse_yaml, read_settings, words_of_type

# From this similarity on, an unknown flag is taken for a misspelt option, not for a flag of another program.
_ALIKE = 0.85
_Section = types.StructType | types.DataclassType


@dataclasses.dataclass(frozen=True)
class Option:
    """Adds details of a command-line option to a field's type, as in `Annotated[str, Option("ID")]`.

    Attributes:
      metavar: placeholder for the value in help.
      each: for a tuple, whether the option's name is repeated before every value, because other words may follow.
      choices: `module:name` of the allowed values; the module is imported only if the command is used.
    """

    metavar: str = ""
    each: bool = False
    choices: str = ""


class Positional(Option):
    """Marks a field as a positional argument: the value is written without an option's name."""


class Outcome(NamedTuple):
    """The result of a command.

    Attributes:
      text: text printed for people; None if the command has printed all already.
      content: plain data that a `Reporting` command prints with `--json`, as one JSON object, instead of the text.
      status: the exit status.
    """

    text: str | None
    content: Any = None
    status: int = 0


class Command(Settings):
    """A command: the fields are the options, and the docstring's first line is the summary.

    A field whose type is another `Settings` class, or a dataclass, adds the options of that class. A field whose type
    is a union of tagged classes is an option that chooses one of the classes. Fields with the same name share one
    option. The field of the command itself describes the option; if there is none, the first of the fields with that
    name does. A boolean field is a flag, named `--no-...` if the default is true. A tuple field takes several words,
    and may be repeated.

    Attributes:
      exactly_one: groups of fields of which exactly one must be given.
      at_most_one: groups of fields of which at most one may be given.
      fixed: values, by name, of fields that get no option.
      rest: name of the field that takes unknown flags; empty if unknown flags are errors.
      separator: text between the words of an option's name.
    """

    exactly_one: ClassVar[tuple[tuple[str, ...], ...]] = ()
    at_most_one: ClassVar[tuple[tuple[str, ...], ...]] = ()
    fixed: ClassVar[Mapping[str, Any]] = {}
    rest: ClassVar[str] = ""
    separator: ClassVar[str] = "-"

    def run(self) -> Outcome:
        """Runs the command; raises a `UserError` for a problem that the user can solve."""
        raise NotImplementedError


class Reporting(Command):
    """A command that prints a result as text or, with `--json`, as JSON for programs.

    Attributes:
      json: print one JSON object on standard output.
    """

    json: bool = False


@dataclasses.dataclass(frozen=True)
class Table:
    """The commands of a program.

    Attributes:
      prog: the program's name, for messages and help.
      about: purpose of the commands.
      commands: for each command name, either `module:class`, whose module is imported only if the command is used, or a
        table of subcommands.
      version: text that `--version` prints; empty for none.
    """

    prog: str
    about: str
    commands: Mapping[str, "str | Table"]
    version: str = ""


def main(table: Table, arguments: Sequence[str] | None = None) -> int:
    """Runs the command that `arguments` names, prints the result, and returns the exit status.

    By default, the arguments are those of the process. The exit status is 2 for a problem that the user can solve,
    which is described in one line on standard error. It is 130 if the user stopped the command; the text of the
    KeyboardInterrupt, if any, is printed. Otherwise, the command
    decides the exit status.

    Raises:
      SystemExit: with status 0, for `--help` and `--version`.
    """
    prog = table.prog
    try:
        prog, kind, words = _named(table, sys.argv[1:] if arguments is None else arguments, prog)
        command = _read(prog, kind, words)
        outcome = command.run()
    except (UserError, OSError) as error:
        sentence = sentence_for_user(error)
        if sentence is None:
            raise
        print(f"{prog}: {sentence}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        print(": ".join(filter(None, [prog, "stopped", str(stop)])), file=sys.stderr)
        return 130
    text = json.dumps(outcome.content) if isinstance(command, Reporting) and command.json else outcome.text
    if text is not None:
        print(text, flush=True)
    return outcome.status


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Imports the modules of a command without garbage collection: `with loading(): import ...`.

    Python's collector would search all objects of TensorFlow and TFF again and again while more are imported: a fifth
    of the time of the import. Modules live as long as the process, so the collector leaves their objects out later,
    too. Nothing is left out if nothing new was imported.
    """
    was_enabled, before = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > before:
            gc.freeze()
        if was_enabled:
            gc.enable()


def assigned(option: str, assignments: Sequence[str], form: str) -> dict[str, str]:
    """Splits words such as `name=value` into values by name; of several words with one name, the last one counts.

    Args:
      option: the option that has these words, for error messages.
      assignments: the words.
      form: the form of a word, for error messages.

    Raises:
      ConfigError: a word has no `=`.
    """
    values = {}
    for assignment in assignments:
        name, separator, value = assignment.partition("=")
        if not separator:
            raise ConfigError(f"{option} {assignment!r} must have the form {form}")
        values[name] = value
    return values


def assigned_values(option: str, assignments: Sequence[str]) -> dict[str, Any]:
    """Reads the words `KEY=VALUE` of an option: plain data by key, from values in YAML.

    Raises:
      ConfigError: a word has no `=`, or a value is not YAML.

    >>> assigned_values("--set", ["rounds=10", "values=[0.1, 1]"])
    {'rounds': 10, 'values': [0.1, 1]}
    """
    found = assigned(option, assignments, "KEY=VALUE")
    return {key: parse_yaml(value, f"{option} {key}") for key, value in found.items()}


class _Parser(argparse.ArgumentParser):
    def __init__(self, prog: str, description: str, **others: Any):
        super().__init__(prog, description=description, formatter_class=argparse.RawDescriptionHelpFormatter, **others)
        # Or else "-inf" and "-1e-3" are unknown options.
        self._negative_number_matcher = re.compile(r"^-(\d|\.\d|inf|nan)", re.IGNORECASE)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")


def _named(table: Table, arguments: Sequence[str], prog: str) -> tuple[str, type[Command], Sequence[str]]:
    """Returns the full name, the class and the words of a command."""
    first = list(arguments[:1])
    about = _overview(table) if first in (["-h"], ["--help"]) else ""
    parser = _Parser(prog, about, usage="%(prog)s [-h] COMMAND ...")
    parser.add_argument("command", metavar="COMMAND", help=argparse.SUPPRESS)
    if table.version:
        parser.add_argument("--version", action="version", version=table.version)
    name = parser.parse_args(first).command
    if name not in table.commands:
        parser.error(f"unknown command {name!r}; {did_you_mean(name, table.commands)}")
    entry, prog = table.commands[name], f"{prog} {name}"
    if isinstance(entry, Table):
        return _named(entry, arguments[1:], prog)
    return prog, _imported(entry), arguments[1:]


def _overview(table: Table) -> str:
    width = max(map(len, table.commands))
    lines = [table.about.rstrip(), "", "commands:"]
    for name, entry in table.commands.items():
        text = entry.about if isinstance(entry, Table) else _imported(entry).__doc__
        lines.append(f"  {name:<{width}}  {text.partition(chr(10))[0]}")
    return "\n".join(lines)


def _imported(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def _read(prog: str, command: type[Command], words: Sequence[str]) -> Command:
    fields = {name: field for name, field in _fields(command).items() if name not in command.fixed}
    rest = fields.pop(command.rest, None)
    help_text = inspect.cleandoc(command.__doc__ or "").partition("\nAttributes:")[0].replace("%(prog)s", prog)
    epilog = rest and f"flags that are not listed here: {rest.help}"
    parser = _Parser(prog, help_text, allow_abbrev=not rest, epilog=epilog)
    places: dict[str, Any] = {}
    for is_required, groups in ((True, command.exactly_one), (False, command.at_most_one)):
        for names in groups:
            places |= dict.fromkeys(names, parser.add_mutually_exclusive_group(required=is_required))
    flags = {name: field.add(places.get(name, parser), command.separator) for name, field in fields.items()}
    known = ["--help", *flags.values()]
    for word in itertools.takewhile(lambda word: word != "--", words):
        flag = word.partition("=")[0]
        is_ours = not flag.startswith("--") or any(one == flag or (not rest and one.startswith(flag)) for one in known)
        if not is_ours and (not rest or difflib.get_close_matches(flag, known, 1, _ALIKE)):
            parser.error(f"unknown option {flag}; {did_you_mean(flag, known)}")
    given, others = parser.parse_known_args(words)
    if others and not rest:
        parser.error(f"unexpected argument {others[0]!r}")
    values = {name: field.default for name, field in fields.items() if field.default is not msgspec.NODEFAULT}
    values |= {**command.fixed, **({command.rest: tuple(others)} if rest else {})}
    values |= {name: fields[name].typed(flags[name], value) for name, value in vars(given).items()}
    try:
        return _made(command, values)
    except ValueError as error:
        raise ConfigError(str(error)) from None


@dataclasses.dataclass
class _Field:
    """Holds a field as an option; `info` is its type without None."""

    name: str
    hint: Any
    help: str
    default: Any
    is_required: bool

    def __post_init__(self):
        marks = [mark for mark in getattr(self.hint, "__metadata__", ()) if isinstance(mark, Option)]
        self.how, self.info = marks[0] if marks else Option(), types.type_info(self.hint)
        self.takes_none = False
        if isinstance(self.info, types.UnionType):
            some = tuple(one for one in self.info.types if not isinstance(one, types.NoneType))
            self.takes_none = len(some) < len(self.info.types)
            self.info = some[0] if len(some) == 1 else types.UnionType(some)

    def add(self, place: Any, separator: str) -> str:
        """Adds the option to a parser, or to a group of one, and returns how it is written."""
        item, shown = self.info, self.help.rstrip(".").replace("`", "")
        words: dict[str, Any] = {"default": argparse.SUPPRESS}
        if isinstance(item, types.BoolType):
            words["action"] = "store_false" if self.default else "store_true"
            shown = f"switch off: {shown}" if self.default else shown
        elif isinstance(item, types.VarTupleType):
            item = item.item_type
            nargs = "*" if self.takes_none else "+"
            words |= {"action": "append"} if self.how.each else {"action": "extend", "nargs": nargs}
        if not isinstance(item, types.BoolType):
            choices = _imported(self.how.choices) if self.how.choices else getattr(item, "values", ())
            names = {types.IntType: "N", types.FloatType: "X", types.CustomType: "PATH"}
            shape = f"{{{','.join(map(str, choices))}}}" if choices else names.get(type(item))
            words["metavar"] = self.how.metavar or shape
            default = self.default if isinstance(self.default, tuple) else (self.default,)
            if default and default[0] not in (None, msgspec.NODEFAULT):
                shown += f"; default {' '.join(f'{one:g}' if isinstance(one, float) else str(one) for one in default)}"
        words["help"] = shown.replace("%", "%%")
        if isinstance(self.how, Positional):
            place.add_argument(self.name, **words)
            return self.how.metavar or self.name
        flag = "--" + ("no_" if self.default is True else "") + self.name
        flag = flag.replace("_", separator)
        place.add_argument(flag, dest=self.name, required=self.is_required, **words)
        return flag

    def typed(self, flag: str, given: Any) -> Any:
        """Converts the words of the option to its type; raises ConfigError for words that do not fit."""
        if self.how.choices and given not in (known := _imported(self.how.choices)):
            raise ConfigError(f"unknown {flag} {given!r}; {did_you_mean(given, known)}")
        try:
            return msgspec.convert(given, self.hint, strict=False, dec_hook=lambda kind, word: kind(word))
        except msgspec.ValidationError:
            shown = " ".join(given) if isinstance(given, list) else given
            raise ConfigError(f"{flag} must be {words_of_type(self.info)}, not {shown!r}") from None


def _fields(owner: Any) -> dict[str, _Field]:
    """Returns the options of a class and of the classes of its fields, by name."""
    told, hints = meanings(owner), typing.get_type_hints(owner, include_extras=True)
    found: dict[str, _Field] = {}
    inner: dict[str, _Field] = {}
    for one in _inspected(owner):
        sections = _sections(one)
        tags = _tags(sections)
        if tags or not sections:
            hint = Literal[tags] if tags else hints[one.name]
            found[one.name] = _Field(one.name, hint, told.get(one.name, ""), one.default, one.required)
        for name, field in itertools.chain(*(_fields(section.cls).items() for section in sections)):
            field.help = told.get(name, field.help)
            if tags:
                field.is_required, field.default = False, msgspec.NODEFAULT
            inner.setdefault(name, field)
    return found | {name: field for name, field in inner.items() if name not in found}


def _inspected(owner: Any) -> tuple[types.Field, ...]:
    return typing.cast(_Section, types.type_info(owner)).fields


def _sections(field: types.Field) -> list[_Section]:
    """Returns the classes of a field that brings the options of others: one, or several with tags."""
    options = field.type.types if isinstance(field.type, types.UnionType) else (field.type,)
    return [one for one in options if isinstance(one, _Section)]


def _tags(sections: Sequence[_Section]) -> tuple[str, ...]:
    return tuple(str(one.tag) for one in sections if isinstance(one, types.StructType) and one.tag)


def _made(owner: Any, values: Mapping[str, Any]) -> Any:
    """Makes a class of the values of its fields, and of the fields of their classes, by name."""
    arguments = {}
    for one in _inspected(owner):
        sections = _sections(one)
        if _tags(sections):
            names = {field.name for section in sections for field in section.fields} & values.keys()
            content = {"kind": values[one.name], **{name: values[name] for name in names}}
            arguments[one.name] = read_settings(typing.get_type_hints(owner)[one.name], content, one.name)
        elif sections:
            arguments[one.name] = _made(sections[0].cls, values)
        elif one.name in values:
            arguments[one.name] = values[one.name]
    return owner(**arguments)
