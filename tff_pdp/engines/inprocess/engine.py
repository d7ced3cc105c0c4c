"""The engine inside this process, which runs TFF computations on a chosen device."""

import collections
import contextlib
import logging
import math
import threading
from collections.abc import Iterator
from typing import Any, Self

import tensorflow as tf

from tff_pdp import _tff
from tff_pdp.engines.base import WithoutWorkers, resolve_device
from tff_pdp.engines.inprocess.clients import Lanes
from tff_pdp.engines.inprocess.execution import LoadedProgram
from tff_pdp.engines.inprocess.parts import Mode
from tff_pdp.engines.inprocess.stacked import CannotStack
from tff_pdp.errors import EngineError
from tff_pdp.settings import ClientParallelism

_logger = logging.getLogger(__name__)
_KEPT_PROGRAMS = 64
_CLIENTS_PER_CALL = 256


class InProcessEngine(WithoutWorkers, _tff.SyncContext):
    """Executes computations in this process, one at a time, in the calling thread.

    Results at the server are tensors, results at clients are `ClientValues`. Both stay on the device, and are not
    copied when they are passed to the next round.

    Attributes:
      choices: modes that `auto` chose (one by one, or as stacks), by the computation's fingerprint.
    """

    name = "inprocess"

    def __init__(
        self,
        *,
        device: str = "auto",
        client_parallelism: ClientParallelism = "auto",
        clients_per_call: int = _CLIENTS_PER_CALL,
        choices: dict[str, Mode] | None = None,
        cores: int | None = None,
    ):
        """Builds the engine on a device; the engine is then ready for use.

        Args:
          device: `cpu`, `gpu`, `gpu:N` or `auto`.
          client_parallelism: `loop` makes one call per client, on several cores; `vectorized` makes one call for
            clients of equal shapes, and falls back to the loop if a computation cannot be stacked; `auto` times both at
            the first call of each computation and keeps the faster.
          clients_per_call: largest number of clients that are computed at a time; memory grows with this number.
          choices: earlier choices of `auto`, by fingerprint, for a resumed run; the engine adds its new choices.
          cores: number of cores to use on a CPU; None for all that this process may use.

        Raises:
          EngineError: the device is absent.
        """
        self._device = resolve_device(device)
        self._parallelism = client_parallelism
        self._clients_per_call = clients_per_call
        self.choices = {} if choices is None else choices
        self._programs: collections.OrderedDict[int, LoadedProgram] = collections.OrderedDict()
        self._invocation = threading.Lock()
        self._lanes = Lanes(self._device, cores)
        self._closed = False

    @property
    def device(self) -> str:
        """Device that the engine computes on: `cpu` or `gpu:N`."""
        return self._device.removeprefix("/").lower().replace("cpu:0", "cpu")

    @contextlib.contextmanager
    def install(self) -> Iterator[Self]:
        """Sends the TFF computations called in this thread inside the `with` block to this engine."""
        self._check_open()
        with _tff.get_context_stack().install(self):
            yield self

    def close(self) -> None:
        """Forgets all compiled computations; a second call does nothing."""
        with self._invocation:
            self._closed = True
            self._programs.clear()
            self._lanes.close()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("This engine has been closed: build another.")

    def invoke(self, comp: Any, arg: Any) -> Any:
        """Runs a computation to its end.

        Returns:
          Values at the server as tensors on the device, in the containers of their type; values at the clients as
          `ClientValues`.

        Raises:
          EngineError: the engine is closed, or does not support a part of the computation.
          TypeError: an argument does not match the computation's parameter.
          ValueError: arguments have different numbers of clients.
          tf.errors.OpError: the computation itself fails.
        """
        with self.computing():
            program = self.load(comp)
            shared, own = program.take(arg)
            if program.mode is None:
                program.mode = self._choose_mode(program, shared, own)
            try:
                return self._run(program, shared, own, program.mode or "loop")
            except CannotStack as error:
                # As text: handlers may keep records, and the error object would keep traced graphs alive.
                _logger.warning("clients are computed one by one, because %s", str(error))
                program.mode = self.choices[program.fingerprint] = "loop"
                return self._run(program, shared, own, "loop")

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Computes on the engine's device inside the `with` block, and makes other threads wait for the block's end.

        Raises:
          EngineError: the engine is closed.
        """
        with self._invocation, tf.device(self._device):
            self._check_open()
            yield

    def _run(self, program: LoadedProgram, shared: Any, own: Any, mode: Mode) -> Any:
        return program.run(shared, own, mode, self._clients_per_call)

    def _compare(self, program: LoadedProgram, shared: Any, own: Any) -> dict[Mode, float]:
        return program.compare(shared, own, self._clients_per_call)

    def compute_alike(self, computation: Any, other: Any) -> None:
        """Makes `computation` use the mode that `auto` chose for `other`; does nothing if `auto` has not chosen yet.

        The same client work then has the same bits in both computations.
        """
        with self._invocation:
            self._check_open()
            mode = self.choices.get(self.load(other).fingerprint)
            if mode is not None:
                self.choices[self.load(computation).fingerprint] = mode

    def load(self, computation: Any) -> LoadedProgram:
        """Lowers a computation, unless that was done already; to be called inside `computing`."""
        # A TFF computation's hash serialises it, so the key is the id; the program keeps the computation and its id.
        key = id(computation)
        if key not in self._programs:
            self._programs[key] = LoadedProgram(computation, self._lanes)
            if len(self._programs) > _KEPT_PROGRAMS:
                self._programs.popitem(last=False)
        self._programs.move_to_end(key)
        return self._programs[key]

    def _choose_mode(self, program: LoadedProgram, shared: Any, own: Any) -> Mode | None:
        """Chooses the mode for further calls; None if this call has no clients to time."""
        have_work = any(level.clients or level.aggregations for level in program.program.levels)
        if not have_work or not own or not len(next(iter(own.values()))):
            return None
        # A fingerprint needs all graphs to be read, so it is computed only when it is used.
        if self.choices and program.fingerprint in self.choices:
            return self.choices[program.fingerprint]
        if self._parallelism != "auto":
            return "loop" if self._parallelism == "loop" else "vectorized"
        seconds = self._compare(program, shared, own)
        is_stacking_faster = seconds.get("vectorized", math.inf) < seconds["loop"]
        mode: Mode = "vectorized" if is_stacking_faster else "loop"
        self.choices[program.fingerprint] = mode
        _logger.info(
            "clients are computed %s (%s)",
            "as stacks" if mode == "vectorized" else "one by one",
            ", ".join(f"{name}: {1000 * spent:.1f} ms" for name, spent in seconds.items()),
        )
        return mode
