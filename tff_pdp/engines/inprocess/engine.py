"""The engine inside this process, which runs TFF computations on a chosen device."""

import collections
import contextlib
import logging
import threading
from collections.abc import Iterator
from typing import Any, Self

import tensorflow as tf

from tff_pdp import _tff
from tff_pdp.engines.base import resolve_device
from tff_pdp.engines.inprocess.clients import CannotCompile, Lanes, Mode
from tff_pdp.engines.inprocess.execution import LoadedProgram
from tff_pdp.engines.inprocess.stacked import CannotStack
from tff_pdp.errors import EngineError
from tff_pdp.settings import ClientParallelism, Xla

_logger = logging.getLogger(__name__)
_KEPT_PROGRAMS = 64
_CLIENTS_PER_CALL = 256
_IN_WORDS = {"loop": "one by one", "vectorized": "as stacks", "compiled": "as stacks that XLA compiles"}


class InProcessEngine(_tff.SyncContext):
    """Executes computations in this process, one at a time, in the calling thread.

    Results at the server are tensors, results at clients are `ClientValues`. Both stay on the device, and are not
    copied when they are passed to the next round.

    Attributes:
      choices: modes that `auto` chose (one by one, as stacks, or as compiled stacks), by the computation's fingerprint.
        Choices of XLA are entered as well, also if `client_parallelism` is not `auto`.
    """

    name = "inprocess"

    def __init__(
        self,
        *,
        device: str = "auto",
        client_parallelism: ClientParallelism = "auto",
        clients_per_call: int = _CLIENTS_PER_CALL,
        xla: Xla = "auto",
        choices: dict[str, Mode] | None = None,
        batched_convolutions: bool | None = None,
    ):
        """Builds the engine on a device; the engine is then ready for use.

        Args:
          device: `cpu`, `gpu`, `gpu:N` or `auto`.
          client_parallelism: `loop` makes one call per client, on several cores; `vectorized` makes one call for
            clients of equal shapes, and falls back to the loop if a computation cannot be stacked; `auto` times both,
            and stacks that XLA compiles where it may, at the first call of each computation and keeps the fastest.
          clients_per_call: largest number of clients that are computed at a time; memory grows with this number.
          xla: where XLA compiles the work of stacked clients: with `auto` on a GPU, with `always` on every device,
            with `never` nowhere. Where XLA cannot compile a computation, the engine warns and does without.
          choices: earlier choices of `auto`, by fingerprint, for a resumed run; the engine adds its new choices.
          batched_convolutions: whether stacked clients compute convolutions with kernels of their own by the batched
            form (`stacked_convolutions`) or in a loop; by default the batched form on a GPU, which launches fewer
            kernels, and the loop on a CPU, where the loop is two to four times as fast.

        Raises:
          EngineError: the device is absent.
        """
        self._device = resolve_device(device)
        is_gpu = not self._device.startswith("/CPU")
        self._may_compile = xla == "always" or (xla == "auto" and is_gpu)
        self._has_batched_convolutions = is_gpu if batched_convolutions is None else batched_convolutions
        self._parallelism = client_parallelism
        self._clients_per_call = clients_per_call
        self.choices = {} if choices is None else choices
        # Results of these computations have been used: another mode would round the same sums differently.
        self._used_compiled = {name for name, mode in self.choices.items() if mode == "compiled"}
        self._programs: collections.OrderedDict[int, LoadedProgram] = collections.OrderedDict()
        self._invocation = threading.Lock()
        self._lanes = Lanes(self._device)
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
          tf.errors.OpError: the computation itself fails.
        """
        with self._invocation, tf.device(self._device):
            self._check_open()
            program = self._load(comp)
            shared, own = program.take(arg)
            if program.mode is None:
                program.mode = self._choose_mode(program, shared, own)
            while True:
                try:
                    result = program.run(shared, own, program.mode or "loop", self._clients_per_call)
                    break
                # As text: handlers may keep records, and the error object would keep traced graphs alive.
                except CannotStack as error:
                    _logger.warning("clients are computed one by one, because %s", str(error))
                    program.mode = self.choices[program.fingerprint] = "loop"
                except CannotCompile as error:
                    if program.fingerprint in self._used_compiled:
                        # If the data are at fault, this fails as well.
                        program.run(shared, own, "vectorized", self._clients_per_call)
                        raise EngineError(
                            f"XLA compiled a computation before, but does not compile the computation now: {error}. "
                            "Without XLA, sums would be rounded differently"
                        ) from error
                    _logger.warning("XLA does not compile clients' work: %s", str(error))
                    program.mode = self.choices[program.fingerprint] = "vectorized"
            if program.mode == "compiled" and program.is_compiled and program.fingerprint not in self._used_compiled:
                if self.choices.get(program.fingerprint) != "compiled":
                    self.choices[program.fingerprint] = "compiled"
                self._used_compiled.add(program.fingerprint)
            return result

    def compute_alike(self, computation: Any, other: Any) -> None:
        """Makes `computation` use the mode that `auto` chose for `other`; does nothing if `auto` has not chosen yet.

        The same client work then has the same bits in both computations.
        """
        with self._invocation:
            self._check_open()
            mode = self.choices.get(self._load(other).fingerprint)
            if mode is not None:
                self.choices[self._load(computation).fingerprint] = mode

    def _load(self, computation: Any) -> LoadedProgram:
        # A TFF computation's hash serialises it, so the key is the id; the program keeps the computation and its id.
        key = id(computation)
        if key not in self._programs:
            self._programs[key] = LoadedProgram(
                computation, self._lanes, has_batched_convolutions=self._has_batched_convolutions
            )
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
        if self._parallelism == "loop":
            return "loop"
        if self._parallelism == "vectorized":
            return "compiled" if self._may_compile else "vectorized"
        seconds = program.compare(shared, own, self._clients_per_call, self._may_compile)
        mode = min(seconds, key=lambda name: seconds[name])
        self.choices[program.fingerprint] = mode
        _logger.info(
            "clients are computed %s (%s)",
            _IN_WORDS[mode],
            ", ".join(f"{name}: {1000 * spent:.1f} ms" for name, spent in seconds.items()),
        )
        return mode
