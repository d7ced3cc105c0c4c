"""Runs the commands on single clients: adding clients to an export, and asking a server for a client's predictions."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tff_pdp.command_line import Option, Outcome, loading
from tff_pdp.commands.experiment import OnExperiment
from tff_pdp.errors import DataError
from tff_pdp.personal_models.new_clients.options import FitOptions
from tff_pdp.settings import Count

if TYPE_CHECKING:
    # It takes seconds to import.
    from serving.client.model_client import ModelClient
    from tff_pdp.data.client_dataset import ClientExamples
    from tff_pdp.experiment.config import ExperimentConfig


class Personalize(OnExperiment):
    """Add clients to the export, fitted to their own examples.

    Only the clients' own part is fitted, starting from the global model: the head, a hypernetwork's descriptor of the
    client, or the choice of a cluster. The result is the next version of the export, which running servers load. If
    silos' examples are protected, each silo's own budget is charged for the fit (docs/privacy.md).

    Attributes:
      examples: an .npz file with x and y of one client; a client dataset; or raw data of the experiment's data.kind,
        such as a folder of LEAF JSON, which are prepared with the experiment's own settings. Held-out examples of a
        dataset and of raw data test the fit.
      client_id: id of the client; default: all clients of a dataset or of raw data.
    """

    examples: Path
    client_id: Annotated[tuple[str, ...], Option("ID")] = ()
    fit: FitOptions

    def run(self) -> Outcome:
        """Adds clients to the export."""
        with loading():
            from tff_pdp.personal_models.new_clients.personalize import (
                personalize,
                personalized_content,
                personalized_text,
            )

        done = personalize(self.experiment(), self.examples, self.client_id, self.fit)
        return Outcome(personalized_text(done), personalized_content(done))


class Predict(OnExperiment):
    """Ask a server for predictions on some of a client's examples.

    The examples are the client's test examples in the client dataset. A client that is not in the dataset, such as one
    that tff-pdp personalize added, needs --examples; without that option, another client's test examples are sent.

    Attributes:
      client_id: id of the client whose personal model answers; the global model answers for an unknown id.
      examples_of: id of the client whose test examples are sent; default: the client of --client-id.
      examples: file or folder of the client's own examples, as for tff-pdp personalize.
      num_examples: number of examples.
      address: host and port of the server.
      grpc: use gRPC; the address must then have the gRPC port.
    """

    client_id: Annotated[str, Option("ID")]
    examples_of: Annotated[str | None, Option("ID")] = None
    examples: Path | None = None
    num_examples: Count = 3
    address: Annotated[str, Option("HOST:PORT")] = "localhost:8501"
    grpc: bool = False

    at_most_one = (("examples_of", "examples"),)

    def run(self) -> Outcome:
        """Sends some examples to a server and shows what comes back."""
        config = self.experiment()
        from tff_pdp.data.manifest import Manifest
        from tff_pdp.personal_models.example_request import exported_id, served_name

        client_id = exported_id(config, self.client_id)
        examples = self._own_examples(config, self.examples) if self.examples else self._test_examples(config)
        x, y = examples.x[: self.num_examples], examples.y[: self.num_examples]
        prediction = self._client().predict(served_name(config, client_id), [client_id] * len(x), x)
        answers = zip(y, prediction.answers, prediction.personalized, strict=True)
        names = Manifest.load(config.clients_folder).class_names
        rows = [{**_answer(label, answer, names), "personalized": bool(own)} for label, answer, own in answers]
        text = "\n".join(
            f"label {_shown(row['label'])}: predicted {_shown(row['predicted'])}"
            + (f" with probability {row['probability']:.3f}" if "probability" in row else "")
            + f" by the {'personal' if row['personalized'] else 'global'} model"
            for row in rows
        )
        return Outcome(text, {"client_id": self.client_id, "predictions": rows})

    def _own_examples(self, config: "ExperimentConfig", path: Path) -> "ClientExamples":
        """Reads the client's examples from a file or folder: held-out examples or, without any, all."""
        with loading():
            from tff_pdp.experiment.model import build_model
            from tff_pdp.personal_models.new_clients.examples import prepared_examples, read_new_clients

        with prepared_examples(config, path) as prepared:
            new = read_new_clients(prepared, [self.client_id], build_model(config))
        return new.held_out[0] if len(new.held_out[0].y) else new.train[0]

    def _test_examples(self, config: "ExperimentConfig") -> "ClientExamples":
        """Reads test examples from the client dataset: of the asked client, or of another for an unknown client."""
        from tff_pdp.data.client_dataset import ClientDataset

        clients = ClientDataset.open(config.clients_folder)
        whose, sizes = self.examples_of or self.client_id, clients.sizes("test")
        tested = [client_id for client_id, size in zip(clients.client_ids, sizes, strict=True) if size]
        if not self.examples_of and self.client_id not in clients.client_ids and tested:
            whose = tested[0]
            print(
                f"note: {config.clients_folder} has no client {self.client_id!r}, so test examples of {whose!r} are "
                "sent; --examples FILE sends the client's own, --examples-of ID those of another client",
                file=sys.stderr,
            )
        examples = clients.load(whose, "test")
        if not len(examples.y):
            raise DataError(
                f"{config.clients_folder}: client {whose!r} has no test examples"
                + (f"; give --examples-of a client that has some, such as {tested[0]!r}" if tested else "")
            )
        return examples

    def _client(self) -> "ModelClient":
        if self.grpc:
            # Imports TensorFlow, which REST does without.
            with loading():
                from serving.client.grpc_client import GrpcClient

            return GrpcClient(self.address)
        from serving.client.rest_client import RestClient

        return RestClient(self.address)


def _shown(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:g}"


def _answer(label: Any, answer: Any, names: Sequence[str] | None) -> dict[str, Any]:
    """Returns one example's label and prediction, by a classifier (probabilities `[num_classes]`) or a regression.

    Classes have their names if `names` is given, otherwise their numbers.
    """
    if answer.ndim:
        numbers = {"label": int(label), "predicted": int(answer.argmax())}
        classes = numbers if names is None else {key: names[number] for key, number in numbers.items()}
        return {**classes, "probability": float(answer.max())}
    return {"label": float(label), "predicted": float(answer)}
