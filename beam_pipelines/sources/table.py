"""Reads tables, CSV or Parquet: one file for each client, or tables with a column of clients.

| setting | columns |
|---|---|
| `label_column` | the label: a class, by name or number, or with `num_classes: 0` a number to be predicted |
| `client_column` | the client of a row; without this setting each file has one client, with the file's name |
| `split_column` | the row's split: `train`, `validation` or `test` |
| `feature_columns` | the features, in this order; by default all other columns, in the order of the header |

Constants that `schema` declares are public. Other constants are taken from the values of all clients: the classes, the
categories of columns with texts, and the length and the largest id of token sequences. The manifest and the privacy
statement name the constants that were taken, because a constant may show a record.
"""

import functools
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from beam_pipelines.options import ClientDatasetOptions, RawData, SourceSettings
from beam_pipelines.tables.columns import Column
from beam_pipelines.tables.files import list_tables
from beam_pipelines.tables.survey import Roles, TableSchema, complete_schema
from beam_pipelines.tables.users import read_client, table_stages
from tff_pdp.data.manifest import MANIFEST_FILE, FeatureSpec, Manifest
from tff_pdp.errors import ConfigError
from tff_pdp.settings import Count, CountOrZero, Name, read_settings, read_yaml, to_plain


class Table(SourceSettings):
    """Reads tables of examples: CSV files, TSV files or Parquet files.

    `input` is a folder with one file for each client, whose name is the name of the client; or, with `client_column`, a
    table or a folder of tables with the rows of many clients. See docs/own_data.md.

    Attributes:
      input_shape: shape of one example; by default the number of values that the columns give.
      num_classes: 0 for a regression; a number n of classes if labels are whole numbers from 0 to n - 1; by default,
        the number of classes that the schema or the data name.
      label_column: name of the column of labels.
      client_column: name of the column of clients; by default, each file has the examples of one client.
      split_column: name of a column with `train`, `validation` or `test`; by default, the job divides each client's
        examples.
      feature_columns: names of the columns of features, in the order of the values in an example; by default all other
        columns.
      schema: kind of each column, by name, or the name of a YAML file with this mapping. Declared constants are
        public; other constants are taken from the data, and named as treated as public.
    """

    input_shape: tuple[Count, ...] = ()
    num_classes: CountOrZero | None = None
    label_column: Name
    client_column: Name | None = None
    split_column: Name | None = None
    feature_columns: Annotated[tuple[Name, ...], Meta(min_length=1)] | None = None
    schema: dict[str, Column] | Name = msgspec.field(default_factory=dict)

    @property
    def roles(self) -> Roles:
        """The columns that the settings name."""
        return Roles(self.label_column, self.client_column, self.split_column, self.feature_columns)

    def declared(self) -> dict[str, Column]:
        """Returns the declared columns, from the settings or from the file that the settings name.

        Raises:
          ConfigError: the file cannot be read, or is not a schema.
        """
        if isinstance(self.schema, str):
            return read_settings(dict[str, Column], read_yaml(self.schema) or {}, self.schema)
        return self.schema

    def build(self, workspace: Path) -> RawData:
        """Describes the tables as raw data.

        Raises:
          ConfigError: a setting does not suit the tables.
          DataError: a table is missing or damaged, or a column must be declared.
        """
        folder, names = list_tables(Path(self.input))
        if self.client_column is None and not Path(self.input).is_dir():
            raise ConfigError(
                f"data.input: {self.input} is one table; name the column of clients in data.client_column, or give a "
                "folder with one file for each client"
            )
        schema, _ = complete_schema(folder, names, self.roles, self.declared(), self.num_classes)
        features = self._features(schema)
        is_divided = self.client_column is None
        return RawData(
            "table",
            folder,
            names,
            functools.partial(read_client, schema) if is_divided else None,
            are_images=False,
            has_test_examples=self.split_column is not None,
            has_validation_examples=self.split_column is not None,
            user_stages=None if is_divided else functools.partial(table_stages, folder, names, schema),
            parameters=_parameters(schema),
            features=features,
            class_names=schema.class_names,
            treated_as_public=schema.treated_as_public,
        )

    def job_options(self, output: Path, *, overwrite: bool) -> ClientDatasetOptions:
        """Returns the job's options; shape and number of classes are open until `RawData.features` replaces them."""
        stated = replace(self, input_shape=self.input_shape or (1,), num_classes=self.num_classes or 0)
        return super(Table, stated).job_options(output, overwrite=overwrite)

    def of_more_clients(self, path: Path, manifest: Manifest) -> SourceSettings:
        """Returns settings that read further clients with the columns and classes of a prepared dataset."""
        columns, label = manifest.parameters["columns"], manifest.parameters["label"]
        schema = read_settings(dict[str, Column], {**columns, **label}, MANIFEST_FILE, "parameters")
        stated = replace(self, feature_columns=tuple(columns), schema=schema)
        return super(Table, stated).of_more_clients(path, manifest)

    def _features(self, schema: TableSchema) -> FeatureSpec:
        shape = self.input_shape or (schema.num_values,)
        size = functools.reduce(lambda product, one: product * one, shape, 1)
        if size != schema.num_values:
            raise ConfigError(
                f"data.input_shape is {list(shape)}, which has {size} values; the columns give {schema.num_values}: "
                "leave out data.input_shape, or change data.feature_columns"
            )
        return FeatureSpec.of(shape, len(schema.class_names or ()))


def _parameters(schema: TableSchema) -> dict[str, Any]:
    """Returns the schema as JSON values for the manifest."""
    roles = schema.roles
    label = {} if schema.label is None or roles.label is None else {roles.label: to_plain(schema.label)}
    return {
        "label_column": roles.label,
        "client_column": roles.client,
        "split_column": roles.split,
        "columns": {name: to_plain(kind) for name, kind in schema.features},
        "label": label,
    }
