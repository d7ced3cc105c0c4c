"""Names a client and its model in requests to a server, and writes a request that asks for one client's model."""

import json
import shlex
from typing import NamedTuple

import numpy as np

from serving.client_ids import ClientIdHash
from tff_pdp.data.client_dataset import ClientDataset
from tff_pdp.experiment.config import ExperimentConfig
from tff_pdp.files import replace_text

# The REST address of `tff-pdp serve` without options.
_ADDRESS = "http://localhost:8501"


class ExampleRequest(NamedTuple):
    """A request to a server of an export.

    Attributes:
      client_id: the client's id in the client dataset.
      command: line of a shell that sends the request.
    """

    client_id: str
    command: str


def exported_id(config: ExperimentConfig, client_id: str) -> str:
    """Returns a client's id in exports and requests.

    Raises:
      ServingError: the key that hashes ids is missing or damaged.
    """
    return client_id if config.export.client_ids == "plain" else ClientIdHash.load(config.client_id_key)(client_id)


def served_name(config: ExperimentConfig, exported: str) -> str:
    """Returns the name of the model that answers for a client: the common model, or the client's own model.

    `exported` is the client's id in the export.
    """
    base_path = config.export_folder
    own = base_path.with_name(f"{base_path.name}.{exported}")
    is_divided = config.export.layout == "per_client" or (own.is_dir() and not base_path.is_dir())
    return own.name if is_divided else base_path.name


def write_example_request(config: ExperimentConfig) -> ExampleRequest | None:
    """Writes a request for the first client beside the export, and returns the command that sends it.

    The example in the request has zeros in place of anybody's data. Returns None if no client is in the dataset.

    Raises:
      DataError: the client dataset is missing or damaged.
      ServingError: the key that hashes ids is missing or damaged.
    """
    client_ids = ClientDataset.open(config.clients_folder).client_ids
    if not client_ids:
        return None
    exported = exported_id(config, client_ids[0])
    name = served_name(config, exported)
    path = config.export_folder.parent / f"{name}.request.json"
    x = np.zeros((1, *config.data.input_shape)).tolist()
    replace_text(path, json.dumps({"inputs": {"client_id": [exported], "x": x}}) + "\n")
    url = f"{_ADDRESS}/v1/models/{name}:predict"
    return ExampleRequest(client_ids[0], shlex.join(["curl", "-d", f"@{path}", url]))
