"""Runs FedAvg of the workloads W1 and W2 with clients at workers, which draw the clients' examples themselves."""

import collections
import dataclasses
import functools
from typing import Any

import numpy as np

from benchmarks.rounds.contenders.ours import FedAvgRounds
from benchmarks.rounds.workloads import FedAvgWorkload
from tff_pdp.engines.client_values import ClientValues
from tff_pdp.engines.far_values import FarValues
from tff_pdp.engines.ray_workers.calls import PoolOptions
from tff_pdp.engines.running import build_engine


@dataclasses.dataclass(frozen=True)
class Address:
    """Names a workload for workers."""

    setup_key: str


@dataclasses.dataclass(frozen=True)
class ExamplesOfClients:
    """Draws the examples of clients; rows are the clients' numbers."""

    setup_key: str
    is_lasting = False

    def load(self, host: "WorkloadHost", rows: np.ndarray, member_type: Any) -> ClientValues:
        """Returns the examples of some clients."""
        return host.examples(self.setup_key, rows, member_type)


@dataclasses.dataclass(frozen=True)
class DrawnWorkload(FedAvgWorkload):
    """A workload whose clients' examples stay in memory, so that drawing them takes no part of a round's time."""

    @classmethod
    def of(cls, workload: FedAvgWorkload) -> "DrawnWorkload":
        """Draws the examples of all clients."""
        drawn = cls(**{field.name: getattr(workload, field.name) for field in dataclasses.fields(workload)})
        for client in range(drawn.population):
            drawn.client_data(client)
        return drawn

    @functools.cache  # noqa: B019 - a process has one or two workloads.
    def client_data(self, client: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the examples of one client."""
        return super().client_data(client)


class WorkloadHost:
    """Builds a workload's computation at a worker, and keeps the examples of all clients."""

    def __init__(self):
        """Prepares to build workloads when they are asked for."""
        self._workloads: dict[str, FedAvgWorkload] = {}
        self._rounds = functools.cache(self._build)

    def knows(self, key: str) -> bool:
        """Checks if the worker has the workload with this name."""
        return key in self._workloads

    def learn(self, key: str, setup: FedAvgWorkload) -> None:
        """Keeps a workload under its name."""
        self._workloads[key] = DrawnWorkload.of(setup)

    def computation(self, address: tuple[Address, str]) -> Any:
        """Returns a round's computation."""
        return self._rounds(address[0].setup_key).process.next

    def examples(self, key: str, clients: np.ndarray, member_type: Any) -> ClientValues:
        """Returns the examples of some clients."""
        return ClientValues.from_members(member_type, [self._client(key, int(client)) for client in clients])

    def _client(self, key: str, client: int) -> Any:
        x, y = self._workloads[key].client_data(client)
        return collections.OrderedDict(x=x, y=y.astype(np.int64), num_examples=np.int32(len(y)))

    def _build(self, key: str) -> FedAvgRounds:
        return FedAvgRounds(self._workloads[key], build_engine("inprocess", "cpu"))


class FarFedAvgRounds(FedAvgRounds):
    """FedAvg with clients at workers; a directory of one workload for the engine."""

    def __init__(self, workload: FedAvgWorkload, num_workers: int, client_parallelism: str):
        """Starts the workers, with one core each."""
        self.engine: Any = build_engine(
            "ray",
            "cpu",
            build_host=WorkloadHost,
            directory=self,
            options=PoolOptions(num_workers=num_workers, cpus_per_worker=1),
            client_parallelism=client_parallelism,
        )
        super().__init__(workload, self.engine)

    def address_of(self, computation: Any) -> Any:
        """Returns the address of a round's computation."""
        return (Address(self._workload.name), "next") if computation is self.process.next else None

    def setup(self, key: str) -> FedAvgWorkload:
        """Returns the workload."""
        del key
        return self._workload

    def prepare(self, round_number: int) -> Any:
        """Describes the clients of a round."""
        clients = np.array(self._workload.cohort(round_number))
        shape = (28, 28, 1) if self._workload.model == "cnn" else (784,)
        size = self._workload.examples_per_client
        shapes = [((size, *shape), (size,))] * len(clients)
        stateless = [self.process.init_client(self.state)] * len(clients)
        recipe = ExamplesOfClients(self._workload.name)
        return stateless, FarValues(self.data_type, recipe, clients, _nothing, shapes)


def _nothing(rows: np.ndarray) -> ClientValues:
    raise RuntimeError(f"the examples of {len(rows)} clients were asked for in the head's process")
