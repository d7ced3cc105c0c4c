"""Defines the options of a deployment, for the command `deploy` and for Python; importing this module is fast."""

import dataclasses

from tff_pdp.settings import Count


@dataclasses.dataclass(frozen=True)
class KitOptions:
    """Sizes of a deployment, and the volume of its models.

    Attributes:
      max_batch_size: largest number of examples in a request and in a merged batch; the default is our clients' limit.
      cpus: number of CPU cores of one server, and number of batches that it runs at the same time.
      replicas: number of servers in Kubernetes.
      volume_claim: name of the PersistentVolumeClaim that holds the models, in Kubernetes.
    """

    max_batch_size: Count = 64
    cpus: Count = 2
    replicas: Count = 2
    volume_claim: str = "personal-models"
