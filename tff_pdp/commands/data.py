"""Describes data of an experiment without TensorFlow: tables before they are prepared, and prepared client datasets."""

from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from beam_pipelines.tables.describe import content_of, describe_tables, text_of
from beam_pipelines.tables.files import list_tables
from beam_pipelines.tables.survey import Roles, complete_schema
from tff_pdp.command_line import Option, Outcome, Reporting, assigned_values
from tff_pdp.data.client_dataset import ClientDataset
from tff_pdp.data.manifest import MANIFEST_FILE, SPLITS
from tff_pdp.errors import ConfigError
from tff_pdp.settings import Count


class DescribeData(Reporting):
    """Describe clients, labels and columns of data, and what would be treated as public.

    Tables (data.kind table) are read as they are, before `tff-pdp prepare`. For other kinds of data, the command
    describes the prepared client dataset.

    Attributes:
      config: an experiment, whose data are described.
      input: tables as in data.input, or the folder of a client dataset.
      set: replace one value of the experiment, by dotted key; may be repeated.
      label_column: column of labels, for --input.
      client_column: column of clients, for --input; default: each table has the examples of one client.
      min_examples_per_client: smallest number of examples of a client that is kept, for --input.
    """

    config: Annotated[str | None, Option("FILE")] = None
    input: Annotated[Path | None, Option("PATH")] = None
    set: Annotated[tuple[str, ...], Option("KEY=VALUE")] = ()
    label_column: Annotated[str | None, Option("NAME")] = None
    client_column: Annotated[str | None, Option("NAME")] = None
    min_examples_per_client: Count = 10

    exactly_one = (("config", "input"),)

    def run(self) -> Outcome:
        """Describes the data of an experiment or at a path."""
        if self.input is not None:
            if (self.input / MANIFEST_FILE).exists():
                return _of_dataset(self.input)
            if self.client_column is None and not self.input.is_dir():
                raise ConfigError(f"--input {self.input} is one table: name the column of clients by --client-column")
            return _of_tables(self.input, Roles(self.label_column, self.client_column), self.min_examples_per_client)
        from beam_pipelines.sources.table import Table
        from tff_pdp.experiment.config import load_experiment

        config = load_experiment(str(self.config), assigned_values("--set", self.set))
        data = config.data
        if not isinstance(data, Table):
            return _of_dataset(config.clients_folder)
        how = {"declared": data.declared(), "num_classes": data.num_classes}
        return _of_tables(Path(data.input), data.roles, data.min_examples_per_client, **how)


def _of_tables(path: Path, roles: Roles, min_examples: int, declared: Any = (), num_classes: Any = None) -> Outcome:
    folder, names = list_tables(path)
    schema, _ = complete_schema(folder, names, roles, dict(declared), num_classes)
    content = content_of(describe_tables(folder, names, schema), schema, min_examples)
    return Outcome(text_of(content), content)


def _of_dataset(path: Path) -> Outcome:
    """Describes a prepared client dataset."""
    clients = ClientDataset.open(path)
    manifest = clients.manifest
    labels: Counter[str] = Counter()
    if manifest.features.num_classes:
        names = manifest.class_names or tuple(map(str, range(manifest.features.num_classes)))
        for client in clients.client_ids:
            for split in SPLITS:
                counts = np.bincount(clients.load(client, split).y, minlength=len(names))
                labels.update(dict(zip(names, counts.tolist(), strict=True)))
    sizes = [sum(counts.values()) for counts in manifest.clients.values()]
    content = {
        "clients": len(sizes),
        "examples": sum(sizes),
        "examples_of_a_client": {"smallest": min(sizes), "largest": max(sizes)},
        "splits": dict(manifest.num_examples),
        "shape": list(manifest.features.shape),
        "classes": dict(labels),
        "left_out_clients": {reason: list(names) for reason, names in manifest.left_out.items()},
        "dropped_examples": {reason: tally.examples for reason, tally in manifest.dropped.items()},
        "treated_as_public": list(manifest.treated_as_public),
    }
    lines = [
        f"clients   {len(sizes)}, with {min(sizes)} to {max(sizes)} examples each",
        f"examples  {sum(sizes)} of shape {list(manifest.features.shape)}: "
        + ", ".join(f"{split} {number}" for split, number in manifest.num_examples.items()),
        *([f"classes   {', '.join(f'{name} {number}' for name, number in labels.items())}"] if labels else ()),
        *(f"left out  {len(names)} ({reason}): {', '.join(names[:10])}" for reason, names in manifest.left_out.items()),
        *(f"dropped   {tally.examples} examples ({reason})" for reason, tally in manifest.dropped.items()),
        *(f"public    taken from the data, not declared: {constant}" for constant in manifest.treated_as_public),
    ]
    return Outcome("\n".join(lines), content)
