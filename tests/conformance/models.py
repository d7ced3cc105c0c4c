"""The models that the conformance tests ask for: written by a seed, and worked out again in NumPy.

    python -m tests.conformance.models DIR

writes them, `models.config` and `batching_parameters.txt`, and prints how to serve them with TensorFlow Serving.
"""

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from serving.production import exports
from serving.production.containers import BATCHING_FILE, batching_parameters
from serving.production.options import KitOptions
from serving.tf_serving import CONFIG_FILE, MODELS_DIRECTORY, ServedModel, Specific, write_model_config_file
from tests.rounding import ELEMENTARY, gamma

CLASSIFIER, REGRESSION = "conformance", "conformance_regression"
CLIENT_IDS = ("alice", "bob", "é ü")
# Grey images of two by two pixels, so that requests can be read.
IMAGE_SHAPE, NUM_CLASSES, HIDDEN_UNITS = (2, 2, 1), 3, 4
NUM_FEATURES = 3
STABLE, CANARY = 1, 2


@dataclasses.dataclass(frozen=True)
class KnownModel:
    """A model whose answers are known: what is shared, and rows of what clients own, the global model's first."""

    name: str
    version: int
    shared: dict[str, np.ndarray]
    stacked: dict[str, np.ndarray]

    def expected(self, client_ids: Sequence[str], x: np.ndarray) -> np.ndarray:
        """Probabilities `[n, NUM_CLASSES]` or values `[n]`, in float64."""
        return np.array([self._answer(client_id, example) for client_id, example in zip(client_ids, x, strict=True)])

    def rounding(self, largest_input: float) -> float:
        """How far answers in float32 may lie from these, of any client: sums over each layer's inputs and a bias.

        What a score loses moves a probability by at most half of it; an exponential, a sum and a quotient come after.
        """
        terms = {**self.shared, **{name: np.abs(stack).max(axis=0) for name, stack in self.stacked.items()}}
        terms = {name: np.abs(value).astype(np.float64) for name, value in terms.items()}
        largest = self._outputs(terms, np.full(terms["dense_0/kernel"].shape[0], largest_input)).max()
        scores = gamma(sum(len(value) + 1 for name, value in terms.items() if name.endswith("kernel"))) * largest
        return scores if self.name == REGRESSION else scores / 2 + gamma(2 * ELEMENTARY + NUM_CLASSES + 1)

    def _answer(self, client_id: str, example: np.ndarray) -> np.ndarray:
        row = CLIENT_IDS.index(client_id) + 1 if client_id in CLIENT_IDS else 0
        weights = {**self.shared, **{name: stack[row] for name, stack in self.stacked.items()}}
        weights = {name: value.astype(np.float64) for name, value in weights.items()}
        outputs = self._outputs(weights, example.ravel().astype(np.float64))
        return outputs[0] if self.name == REGRESSION else np.exp(outputs) / np.exp(outputs).sum()

    def _outputs(self, weights: Mapping[str, np.ndarray], activations: np.ndarray) -> np.ndarray:
        outputs = activations @ weights["dense_0/kernel"] + weights["dense_0/bias"]
        if self.name == REGRESSION:
            return outputs
        return np.maximum(outputs, 0) @ weights["dense_1/kernel"] + weights["dense_1/bias"]


def classifier(version: int) -> KnownModel:
    """A hidden layer that is shared and a head for each client, different in every version."""
    draw = _drawing(version)
    num_rows = len(CLIENT_IDS) + 1
    shared = {
        "dense_0/kernel": draw(int(np.prod(IMAGE_SHAPE)), HIDDEN_UNITS),
        "dense_0/bias": draw(HIDDEN_UNITS),
    }
    stacked = {"dense_1/kernel": draw(num_rows, HIDDEN_UNITS, NUM_CLASSES), "dense_1/bias": draw(num_rows, NUM_CLASSES)}
    return KnownModel(CLASSIFIER, version, shared, stacked)


def regression() -> KnownModel:
    """A linear regression for each client."""
    draw = _drawing(100)
    num_rows = len(CLIENT_IDS) + 1
    stacked = {"dense_0/kernel": draw(num_rows, NUM_FEATURES, 1), "dense_0/bias": draw(num_rows, 1)}
    return KnownModel(REGRESSION, 1, {}, stacked)


def served_models(models_directory: Path) -> list[ServedModel]:
    """The list of models for a server that sees them there."""
    return [
        ServedModel(
            CLASSIFIER,
            models_directory / CLASSIFIER,
            Specific((STABLE, CANARY)),
            {"stable": STABLE, "canary": CANARY},
        ),
        ServedModel(REGRESSION, models_directory / REGRESSION),
    ]


def write_models(folder: Path, models_directory: Path = Path(MODELS_DIRECTORY)) -> None:
    """Writes the exports, the list of them for a server that sees `folder` as `models_directory`, and batching."""
    # TensorFlow comes with it, which those who only compare answers need not wait for.
    from serving.verify.fresh_process import FreshProcess

    with FreshProcess() as process:
        for known in (classifier(STABLE), classifier(CANARY), regression()):
            _export(folder / known.name, known, process)
    write_model_config_file(served_models(models_directory), folder / CONFIG_FILE)
    (folder / BATCHING_FILE).write_text(batching_parameters(KitOptions()))


def docker_command(folder: Path) -> str:
    """What serves them with TensorFlow Serving."""
    batching = ["--enable_batching=true", f"--batching_parameters_file={MODELS_DIRECTORY}/{BATCHING_FILE}"]
    return exports.docker_command(folder, arguments=batching)


def _drawing(seed: int):
    rng = np.random.default_rng(seed)
    return lambda *shape: rng.normal(size=shape).astype(np.float32)


# Of images, whose levels were divided by 255, and of features up to 3.
TOLERANCE = max(classifier(STABLE).rounding(1.0), classifier(CANARY).rounding(1.0)) + gamma(3)
REGRESSION_TOLERANCE = regression().rounding(3.0)


def _export(base_path: Path, known: KnownModel, process) -> None:
    from serving.export.exporter import export_models
    from serving.export.versions import hold
    from serving.models import PersonalModels
    from tff_pdp.models.dense import build_linear_regression, build_mlp

    if known.name == REGRESSION:
        model = build_linear_regression((NUM_FEATURES,))
    else:
        model = build_mlp(IMAGE_SHAPE, NUM_CLASSES, (HIDDEN_UNITS,))
    rows = np.arange(1, len(CLIENT_IDS) + 1, dtype=np.int32)
    with hold(base_path) as held:
        export_models(
            held,
            PersonalModels(model, CLIENT_IDS, rows, known.shared, known.stacked),
            model_name=known.name,
            privacy_report={"claim": "none: these weights are drawn at random"},
            model_card={"purpose": "conformance tests of servers"},
            process=process,
        )


def main() -> None:
    """Writes the models into the folder that the command line names."""
    if len(sys.argv) != 2:
        sys.exit("usage: python -m tests.conformance.models DIR")
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    write_models(folder)
    print(docker_command(folder))
    print("TFF_PDP_SERVING=127.0.0.1:8500,127.0.0.1:8501 python -m pytest tests/conformance")


if __name__ == "__main__":
    main()
