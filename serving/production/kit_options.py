"""What can be chosen about a deployment, and the files of server options that follow from it."""

import dataclasses

from serving.client.model_client import DEFAULT_MAX_BATCH_SIZE
from serving.production.image import DOCKER_IMAGE, METRICS_PATH, MODELS_DIRECTORY
from tff_pdp.errors import ServingError

BATCHING_FILE = "batching_parameters.txt"
MONITORING_FILE = "monitoring.config"
_MIB = 2**20


@dataclasses.dataclass(frozen=True)
class KitOptions:
    """Choices of a deployment.

    Attributes:
      image: the container image of TensorFlow Serving.
      max_batch_size: most examples in a request and in a merged batch, by default as many as our clients send.
      batch_timeout_micros: how long a request may wait for others to be merged with.
      max_enqueued_batches: batches that wait; requests beyond them are UNAVAILABLE, which our clients try again.
      num_batch_threads: batches that run at the same time.
      cpus: CPU cores of one server.
      replicas: servers in Kubernetes.
      grpc_port: port of the gRPC API on a machine that runs docker.
      rest_port: port of the REST API on a machine that runs docker.
      models_directory: where a server sees the models, as `<models_directory>/<model name>/<version>`.
      volume_claim: name of the PersistentVolumeClaim that holds the models in Kubernetes.
    """

    image: str = DOCKER_IMAGE
    max_batch_size: int = DEFAULT_MAX_BATCH_SIZE
    batch_timeout_micros: int = 1000
    max_enqueued_batches: int = 100
    num_batch_threads: int = 2
    cpus: int = 2
    replicas: int = 2
    grpc_port: int = 8500
    rest_port: int = 8501
    models_directory: str = MODELS_DIRECTORY
    volume_claim: str = "personal-models"

    def __post_init__(self):
        """Checks the values.

        Raises:
          ServingError: naming the first that is wrong.
        """
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is int and value < (0 if field.name == "batch_timeout_micros" else 1):
                raise ServingError(f"{field.name} must be positive; was {value}.")


def batching_parameters(options: KitOptions) -> str:
    """The text of a `--batching_parameters_file`.

    Batches are padded to one of few sizes, so that the server meets no size that the warm-up did not come near.
    """
    sizes = [1]
    while sizes[-1] * 2 < options.max_batch_size:
        sizes.append(sizes[-1] * 2)
    sizes = sorted({*sizes, options.max_batch_size})
    lines = [
        f"max_batch_size {{ value: {options.max_batch_size} }}",
        f"batch_timeout_micros {{ value: {options.batch_timeout_micros} }}",
        f"max_enqueued_batches {{ value: {options.max_enqueued_batches} }}",
        f"num_batch_threads {{ value: {options.num_batch_threads} }}",
        # Fills batches up with parts of requests; a request above max_batch_size is refused all the same.
        "enable_large_batch_splitting { value: true }",
        *(f"allowed_batch_sizes: {size}" for size in sizes),
    ]
    return "\n".join(lines) + "\n"


def monitoring_config() -> str:
    """The text of a `--monitoring_config_file` that publishes metrics for Prometheus on the REST port."""
    return f'prometheus_config {{\n  enable: true\n  path: "{METRICS_PATH}"\n}}\n'


def memory_mib(model_nbytes: int) -> int:
    """Memory one server should have, in MiB, for models of so many bytes.

    Twice the models, as a new version is loaded beside the old one, a fifth more for what loading adds, as TensorFlow
    Serving estimates itself, and half a GiB for the server and its requests.
    """
    return 512 + -(-model_nbytes * 12 // (5 * _MIB))
