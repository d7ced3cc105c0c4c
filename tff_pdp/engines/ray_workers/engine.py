"""The engine whose clients are computed by workers on Ray; the server is computed in this process."""

import functools
import itertools
import os
import secrets
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from tff_pdp.engines.client_values import ClientValues
from tff_pdp.engines.far_values import FarValues, ResultValues
from tff_pdp.engines.inprocess.engine import InProcessEngine
from tff_pdp.engines.inprocess.execution import LoadedProgram, few
from tff_pdp.engines.inprocess.graphs import Leaves
from tff_pdp.engines.inprocess.parts import Mode, clients_of, divide, total
from tff_pdp.engines.ray_workers.calls import (
    AddUp,
    Bring,
    ByValue,
    Call,
    Directory,
    Filled,
    Keep,
    LevelInputs,
    PoolOptions,
    Request,
    Writer,
    groups_of,
)
from tff_pdp.settings import ClientParallelism

if TYPE_CHECKING:
    from tff_pdp.engines.ray_workers.pool import Pool


class RayEngine(InProcessEngine):
    """Executes computations with the clients at workers; results have the bits of `InProcessEngine`.

    Clients' values that are given as recipes (`FarValues`) are made by the workers. Only the server's values, sums and
    values of clients that somebody reads cross between processes. Computations whose clients' values are all here run
    in this process.
    """

    def __init__(
        self,
        build_host: Callable[[], Any],
        directory: Directory,
        options: PoolOptions,
        *,
        device: str = "cpu",
        client_parallelism: ClientParallelism = "auto",
        clients_per_call: int = 256,
        choices: dict[str, Mode] | None = None,
    ):
        """Starts the workers.

        Args:
          build_host: function that builds, at a worker, the object for recipes and addresses (`calls.Host`).
          directory: addresses of computations, and setups by which workers build them.
          options: number and places of the workers.
          device: device of the server's part, in this process; the CPU for `auto`.
          client_parallelism: as for `InProcessEngine`; `auto` times both ways at one worker.
          clients_per_call: as for `InProcessEngine`.
          choices: as for `InProcessEngine`.

        Raises:
          EngineError: a device is absent, or no worker starts.
        """
        super().__init__(
            device="cpu" if device == "auto" else device,
            client_parallelism=client_parallelism,
            clients_per_call=clients_per_call,
            choices=choices,
        )
        self._directory = directory
        self._setups: dict[str, Any] = {}
        self._numbers = itertools.count()
        set_up_ray(options)
        from tff_pdp.engines.ray_workers.pool import Pool  # Imports Ray.

        self.pool = Pool(build_host, options)

    @property
    def device(self) -> str:
        """Device that workers compute on: `cpu` or `gpu:0`."""
        return "gpu:0" if self.pool.options.gpus_per_worker else super().device

    def close(self) -> None:
        """Ends the workers, and forgets all compiled computations; a second call does nothing."""
        super().close()
        self.pool.close()

    def expect(self, facts: Callable[[], Any], check: Callable[[Any], str]) -> None:
        """Sets a check that every worker must pass, now and when it is replaced; see `Engine.expect`."""
        self.pool.expect(facts, check)

    def facts(self, find: Callable[[], Any]) -> Any:
        """Returns facts of one worker's machine if workers compute on GPUs, and otherwise of this machine."""
        return self.pool.facts(find) if self.pool.options.gpus_per_worker else find()

    def condition(self) -> str:
        """Describes the workers in a few words, for progress bars."""
        return self.pool.condition()

    def _run(self, program: LoadedProgram, shared: Any, own: Any, mode: Mode) -> Any:
        call = self._call(program, shared, own, mode)
        if call is None:
            return super()._run(program, shared, own, mode)
        return program.run_with(shared, _FarClients(self.pool, program, call, own))

    def _compare(self, program: LoadedProgram, shared: Any, own: Any) -> dict[Mode, float]:
        call = self._call(program, shared, few(own), "loop")
        if call is None:
            return super()._compare(program, shared, own)
        arrays = {name: [leaf.numpy() for leaf in leaves] for name, leaves in shared.items()}
        return self.pool.ask_one("compare", call, arrays, self._clients_per_call)

    def _call(
        self, program: LoadedProgram, shared: Mapping[str, Leaves], own: Mapping[str, ClientValues], mode: Mode
    ) -> Call | None:
        """Returns the description of a call for workers; None if the call is for this process."""
        address = self._directory.address_of(program.computation)
        if address is None or not any(isinstance(values, FarValues) for values in own.values()):
            return None
        if not len(next(iter(own.values()))):
            return None
        described = {
            name: (values.recipe, values.rows)
            if isinstance(values, FarValues) and not isinstance(values, ResultValues)
            else (ByValue.of(values), np.arange(len(values)))
            for name, values in own.items()
        }
        num_shared = None if self.pool.options.gpus_per_worker else program.num_shared(shared)
        parts = divide(own, mode, self._clients_per_call, num_shared)
        keys = {getattr(one, "setup_key", "") for one in (address[0], *(recipe for recipe, _ in described.values()))}
        setups = {key: self._shared_setup(key) for key in sorted(keys) if key}
        number, size = next(self._numbers), self._clients_per_call
        return Call(number, address, program.fingerprint, mode, parts, size, described, setups)

    def _shared_setup(self, key: str) -> Any:
        if key not in self._setups:
            self._setups[key] = self.pool.share(self._directory.setup(key))
        return self._setups[key]


def set_up_ray(options: PoolOptions) -> None:
    """Sets what Ray reads when it is imported."""
    # Workers without GPUs are told to use the CPU, so that Ray need not hide GPUs from them.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if not options.address and "ray" not in sys.modules:
        # A process that can send requests to Ray can run code: this machine's cluster takes only requests with a token.
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))


class _FarClients:
    """Has the clients of one call computed by the workers."""

    def __init__(self, pool: "Pool", program: LoadedProgram, call: Call, own: Mapping[str, ClientValues]):
        self._call, self._program, self._share = call, program, pool.share
        self._results = _Results(pool, program, call)
        self.num_clients = len(next(iter(own.values())))
        self.values = dict(own)

    def run_level(self, number: int, shared: Leaves, sums: Leaves) -> Leaves:
        program, results = self._program, self._results
        inputs = LevelInputs([leaf.numpy() for leaf in shared], [_compact(leaf.numpy()) for leaf in sums])
        self._call.levels[number] = self._share(inputs)
        answers = results.ask(number, AddUp())
        nodes = [(node, [tf.constant(leaf) for leaf in leaves]) for answer in answers for node, leaves in answer]
        everyone = np.arange(self.num_clients)
        for name in program.client_names(number).outputs:
            self.values[name] = ResultValues(
                program.type_of(name),
                everyone,
                bring=functools.partial(results.bring, number, name),
                keep=functools.partial(results.keep, number, name),
            )
        return total(nodes, functools.partial(program.merge, number))


class _Results:
    """Asks for what the workers have computed in one call.

    Results of the call refer to this object, and this object to no result: what a call has sent to the workers is freed
    with the call's last result.
    """

    def __init__(self, pool: "Pool", program: LoadedProgram, call: Call):
        self._pool, self._program, self._call = pool, program, call

    def ask(self, level: int, request: Request) -> list[Any]:
        """Has all parts computed up to a level, unless they are, and returns the answers to a request."""
        call = self._call

        def send(actor: Any, parts: range) -> Any:
            return actor.answer.remote(call, level, parts, request)

        kind = (call.fingerprint, level, type(request))
        return self._pool.ask_for_parts(kind, len(call.parts), send)

    def bring(self, level: int, name: str, rows: np.ndarray) -> ClientValues:
        """Returns the values of the clients at some positions."""
        groups = [group for answer in self.ask(level, Bring(name)) for group in groups_of(answer)]
        everyone = ClientValues(self._program.type_of(name), groups)
        return everyone if np.array_equal(rows, np.arange(len(everyone))) else everyone.select(rows)

    def keep(self, level: int, name: str, writer: Writer) -> list[np.ndarray]:
        """Has the values of all clients stored by a writer; returns each part's clients in the stored order."""
        self.ask(level, Keep(name, writer))
        return [clients_of(part) for part in self._call.parts]


def _compact(leaf: np.ndarray) -> np.ndarray | Filled:
    if leaf.size < 2 or leaf.dtype.kind not in "biuf":
        return leaf
    # Bits are compared, so that zeros keep their sign.
    bits = np.ascontiguousarray(leaf).reshape(-1).view(f"u{leaf.dtype.itemsize}")
    return Filled(leaf.flat[0], leaf.shape) if (bits == bits[0]).all() else leaf
