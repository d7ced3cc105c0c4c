"""Runs `tff-pdp synthesize`: differentially private synthetic data of one silo, with a privacy statement."""

import hashlib
import secrets
import sys
import typing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta

from tff_pdp.command_line import Option, Outcome, Positional, Reporting, assigned_values
from tff_pdp.errors import ConfigError
from tff_pdp.settings import Count, Delta, Finite, Name, Positive

if TYPE_CHECKING:
    # Modules that take a second to import, as accounting does.
    import numpy as np

    from tff_pdp.privacy.synthetic.base import Generator, SyntheticExamples
    from tff_pdp.privacy.synthetic.release import PlannedRelease

STATEMENT_SUFFIX = ".privacy.json"
# Name of these releases in the registry.
SYNTHESIZE = "synthesize"
_ARRAY_OPTIONS = ("low", "high", "num_classes", "radius", "pool")
# Settings of generators that options of their own set, by the setting's name.
_OPTION_OF = {"examples": "rows", **{name: name for name in _ARRAY_OPTIONS}}
# Between these bounds lie all features of a table.
TABLE_RANGE = {"low": -2.0, "high": 2.0}


class Synthesize(Reporting):
    """Make synthetic data of one silo's records, with a privacy statement.

    Reads one silo's records, makes one differentially private release, and writes synthetic records in the form of the
    input, and a privacy statement beside them (OUTPUT.privacy.json). Synthetic records may be published: the guarantee
    is for one record, added or removed (add/remove), against everyone who sees them.

    A table (CSV with a header) needs a schema, a YAML file that describes the columns:
      columns:
        age:     {kind: numeric, low: 0, high: 120, whole: true, bins: 12}
        smoker:  {kind: categorical, categories: [never, former, current]}
        disease: {kind: categorical, categories: ["no", "yes"]}
      label: disease
    With bins, numbers of a column may have any distribution; without bins, a bell curve. The label may be left out.
    Example:
      tff-pdp synthesize ward.csv --schema ward.yaml --output ward_synthetic.csv --rows 5000 --epsilon 2 --delta 1e-6

    Arrays (NPZ with x and, for classes, whole numbers y) need a range, which is 0 to 1 by default:
      tff-pdp synthesize digits.npz --num-classes 10 --radius 3.5 --pool 2 --output made.npz --rows 5000 \\
          --epsilon 2 --delta 1e-6

    --generator names a kind of generator, or module:name; --set gives it further settings (docs/privacy.md lists them).
    Try --dry-run first: it checks the input, and prints the noise and what the noise leaves of small classes. It
    releases nothing, and costs nothing.

    All options are public and not protected: the number of synthetic rows, columns, categories, bounds, range and
    radius. Choose them without looking at the records. The number of records is not published. The command refuses
    records with missing values or values out of bounds, before anything is released; the refusal itself is not private.

    Every call is another release, and costs add up. The registry of all runs counts calls on the same records in the
    same form. The command prints the total for the silo; the statement is about one call, whose epsilon is at most
    --epsilon.

    Attributes:
      input: table (.csv) or arrays (.npz) of one silo.
      output: file for synthetic records, of the same kind; an existing file is never replaced.
      rows: number of synthetic records; must not follow from the number of records.
      epsilon: budget of this release.
      delta: delta of the guarantee, well below 1 / number of records.
      schema: the public description of a table.
      generator: how synthetic records are made: a kind of generator, or module:name.
      set: give the generator a setting, as in --set count_share=0.4; may be repeated.
      low: lower bound of arrays' values; default 0.
      high: upper bound of arrays' values; default 1.
      num_classes: number of classes of arrays; default 1, without labels.
      radius: L2 norm to which an example is clipped, after pooling; default: the largest norm in the range. Noise grows
        with the square of the radius: a radius a little below usual norms is best, if usual norms are public.
      pool: side of the squares of an image that are averaged; default 1.
      dry_run: check the input and describe the release, but make none.
      silo: name of the silo in the registry; default: the input's name without its suffix.
      record_set: declared name of the set of records, as data.record_set of an experiment.
      registry: folder of the registry of all runs; default as in experiments.
    """

    input: Annotated[Path, Positional("INPUT")]
    output: Path
    rows: Annotated[int, Meta(ge=1, le=10**8)]
    epsilon: Positive
    delta: Delta
    schema: Annotated[Path | None, Option("FILE")] = None
    generator: Annotated[Name, Option("NAME")] = "dp_gaussian"
    set: Annotated[tuple[str, ...], Option("KEY=VALUE", each=True)] = ()
    low: Finite | None = None
    high: Finite | None = None
    num_classes: Count | None = None
    radius: Positive | None = None
    pool: Count | None = None
    dry_run: bool = False
    silo: Name | None = None
    record_set: Name | None = None
    registry: Path | None = None

    def __post_init__(self):
        kinds = (".csv", ".npz")
        if self.input.suffix not in kinds:
            raise ValueError(f"INPUT is {self.input}; it must end with .csv or .npz")
        if self.output.suffix != self.input.suffix:
            raise ValueError(f"--output is {self.output}; it must end with {self.input.suffix}, as INPUT does")
        if self.input.suffix == ".csv" and self.schema is None:
            raise ValueError("a table needs --schema, the public description of its columns")
        if self.input.suffix == ".npz" and self.schema is not None:
            raise ValueError("--schema is for tables, not for arrays")
        given = [name for name in _ARRAY_OPTIONS if getattr(self, name) is not None]
        if self.input.suffix == ".csv" and given:
            raise ValueError(f"--{given[0].replace('_', '-')} is for arrays; the schema has the range of a table")

    def run(self) -> Outcome:
        """Makes synthetic records, and writes them and the statement; with `dry_run`, describes them only.

        Guarantee: the cost is in the registry before anything is released; the statement is written before the records.

        Raises:
          ConfigError, DataError, BudgetError: a setting or the records are not usable, or a file is there already. If
            the message does not say that the release has been made, nothing was released.
        """
        for path in (self.output, self.statement_path):
            if path.exists():
                raise ConfigError(f"{path} exists, and is not replaced: another call is another release")
        if not self.output.parent.is_dir():
            raise ConfigError(f"--output: the folder {self.output.parent} does not exist")
        return self._of_table() if self.input.suffix == ".csv" else self._of_arrays()

    @property
    def statement_path(self) -> Path:
        """The path of the privacy statement."""
        return self.output.with_name(self.output.name + STATEMENT_SUFFIX)

    def _of_table(self) -> Outcome:
        from tff_pdp.privacy.synthetic.table import TableSchema, csv_text, read_table, row_digests, rows_of
        from tff_pdp.settings import read_settings, read_yaml, to_plain

        schema: Any = read_settings(TableSchema, read_yaml(typing.cast(Path, self.schema)), str(self.schema))
        kind = self._kind()
        suited = kind.table_settings(schema.radius)
        planned = self._planned(kind, num_classes=len(schema.classes), **TABLE_RANGE, **suited)
        table = read_table(self.input, schema)
        public = [
            "the schema: names of columns, categories, bounds, and the label",
            "the order of columns in the file",
        ]

        def write(made: "SyntheticExamples") -> bytes:
            return csv_text(table.header, rows_of(made, table.header, schema)).encode()

        return self._release(
            planned,
            table.x,
            table.y,
            digested=row_digests(table),
            write=write,
            public=public,
            unit="one row of the table",
            more={"schema": to_plain(schema)},
        )

    def _of_arrays(self) -> Outcome:
        import numpy as np

        from tff_pdp.privacy.synthetic.arrays import read_arrays

        given = {name: getattr(self, name) for name in _ARRAY_OPTIONS if getattr(self, name) is not None}
        planned = self._planned(self._kind(), **given)
        arrays = read_arrays(self.input, planned.generator)
        return self._release(
            planned,
            arrays.x,
            arrays.y,
            digested=arrays.x.astype(np.float32),
            write=arrays.to_bytes,
            public=["the range of values, the number of classes, the shape and dtype of an example"],
            unit="one example",
            more={},
        )

    def _kind(self) -> "type[Generator]":
        from tff_pdp.privacy.synthetic.base import GENERATORS, Generator

        kind = GENERATORS.find(self.generator)
        if not (isinstance(kind, type) and issubclass(kind, Generator)):
            raise ConfigError(f"--generator: {self.generator} is not a subclass of Generator")
        return kind

    def _planned(self, kind: "type[Generator]", **public: Any) -> "PlannedRelease":
        from tff_pdp.privacy.synthetic.release import plan_release
        from tff_pdp.settings import read_settings

        further = assigned_values("--set", self.set)
        for name in further:
            if self.schema is not None and name in _ARRAY_OPTIONS:
                raise ConfigError(f"--set {name} is for arrays; the schema has the range of a table")
            if name in _OPTION_OF:
                raise ConfigError(f"--set {name}: use the option --{_OPTION_OF[name].replace('_', '-')}")
        content = {"examples": self.rows, **public, **further}
        return plan_release(read_settings(kind, content, self.generator), self.epsilon, self.delta)

    def _release(
        self,
        planned: "PlannedRelease",
        x: "np.ndarray",
        y: "np.ndarray",
        *,
        digested: "np.ndarray",
        write: "typing.Callable[[SyntheticExamples], bytes]",
        public: list[str],
        unit: str,
        more: dict[str, Any],
    ) -> Outcome:
        from tff_pdp.digests import write_json
        from tff_pdp.files import write_atomically
        from tff_pdp.privacy.synthetic.base import GENERATORS
        from tff_pdp.privacy.synthetic.release import statement
        from tff_pdp.reports.words import upper

        planned.generator.check(x, y)
        if self.delta * max(1, len(x)) >= 1:
            _tell("note: delta is not below 1 / number of records")
        why_not = planned.generator.why_not_private
        if why_not:
            _tell(f"warning: the synthetic data are not private, and nothing is claimed: {why_not}")
        stated = statement(planned, [*public, "all settings of the generator, the number of synthetic rows"], unit)
        stated |= {"release": planned.generator.plan(x.shape[1:], planned.noise_multiplier), **more}
        if origin := GENERATORS.origin(self.generator):
            stated["generator_origin"] = origin
        guarantee = f"epsilon {upper(planned.epsilon)} at delta {self.delta:g} for {unit}, added or removed"
        if why_not:
            guarantee = "no guarantee"
        if self.dry_run:
            return Outcome(_text_of_plan(guarantee, stated), {**stated, "dry_run": True})
        composed = self._put_on_record(planned, digested, stated)
        _tell(f"making {self.rows} synthetic rows with noise multiplier {planned.noise_multiplier:.4g}")
        content = write(planned.make(x, y))
        stated["output_sha256"] = hashlib.sha256(content).hexdigest()
        write_json(self.statement_path, stated)
        write_atomically(self.output, [content])
        total = "no epsilon holds" if composed["epsilon"] is None else f"epsilon {upper(composed['epsilon'])}"
        lines = [f"{self.output}: {self.rows} synthetic rows", f"{self.statement_path}: {guarantee}"]
        if composed["releases_on_record"] > 1:
            lines.append(f"{composed['releases_on_record']} releases on record use these records; together: {total}")
        # The total depends on which records were in earlier releases: it is for the silo, and not in the statement.
        return Outcome("\n".join(lines), {**stated, "composed": composed})

    def _put_on_record(self, planned: "PlannedRelease", digested: "np.ndarray", stated: dict[str, Any]) -> Any:
        """Enters the release into the registry, and returns the cost of all that is on record of the records."""
        from tff_pdp.registry.entries import Registry
        from tff_pdp.training.record.all_runs import Own, compose, releases_on_record

        registry, folder, silo = Registry(self.registry), self.output.absolute().parent, self.silo or self.input.stem
        records = registry.keep_examples([silo], [digested])
        registry.begin(
            secrets.token_hex(16),
            SYNTHESIZE,
            folder,
            records=records,
            record_set=self.record_set,
            non_private=planned.generator.why_not_private or None,
            ledger=planned.ledger(silo),
            rounds=1,
        )
        cost = compose(registry, releases_on_record(registry, folder), Own(records, self.record_set, [silo]))
        for note in cost.notes:
            _tell(f"note: {note}")
        return cost.by_scope[silo].to_dict(stated["claim"], stated["claim_reason"])


def _tell(text: str) -> None:
    print(f"{SYNTHESIZE}: {text}", file=sys.stderr)


def _text_of_plan(guarantee: str, stated: dict[str, Any]) -> str:
    """Describes a release that has not been made: the guarantee, the noise, and the generator's settings."""
    numbers = {"noise multiplier": stated["noise_multiplier"], **stated["release"]}
    lines = [f"nothing was released; a release would have {guarantee}"]
    lines += [f"  {name.replace('_', ' ')}: {value:,.6g}" for name, value in numbers.items()]
    lines += [f"  {name}: {'default' if value is None else value}" for name, value in stated["generator"].items()]
    return "\n".join(lines)
