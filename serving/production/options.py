"""Options of a deployment, as the command and the library take them; imports nothing heavy."""

import dataclasses

from tff_pdp.settings import Count


@dataclasses.dataclass(frozen=True)
class KitOptions:
    """Says how large a deployment is.

    Attributes:
      max_batch_size: most examples in a request and in a merged batch; by default as many as our clients send.
      cpus: CPU cores of one server, and batches that run at the same time.
      replicas: servers in Kubernetes.
      volume_claim: volume in Kubernetes, the PersistentVolumeClaim that holds the models.
    """

    max_batch_size: Count = 64
    cpus: Count = 2
    replicas: Count = 2
    volume_claim: str = "personal-models"
