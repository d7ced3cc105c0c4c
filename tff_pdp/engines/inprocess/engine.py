"""The engine inside this process, which runs TFF computations on a chosen device."""

import collections
import contextlib
import logging
import math
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Self

import tensorflow as tf

from tff_pdp import _tff
from tff_pdp.engines.base import WithoutWorkers
from tff_pdp.engines.devices import CPU, Place, find_places
from tff_pdp.engines.inprocess.clients import CannotCompile, Lanes
from tff_pdp.engines.inprocess.execution import LoadedProgram
from tff_pdp.engines.inprocess.parts import Mode
from tff_pdp.engines.inprocess.stacked import CannotStack
from tff_pdp.errors import EngineError
from tff_pdp.settings import ClientParallelism, Xla

_logger = logging.getLogger(__name__)
_KEPT_PROGRAMS = 64
_CLIENTS_PER_CALL = 256
# Name of the choice of a device, beside the fingerprints of computations.
DEVICE_CHOICE = "device"
_IN_WORDS = {"loop": "one by one", "vectorized": "as stacks", "compiled": "as stacks that XLA compiles"}


class InProcessEngine(WithoutWorkers, _tff.SyncContext):
    """Executes computations in this process, one at a time, in the calling thread.

    Results at the server are tensors, results at clients are `ClientValues`. Both stay on the device, and are not
    copied when they are passed to the next round.

    Attributes:
      choices: modes that `auto` chose (one by one, as stacks, or as compiled stacks), by the computation's fingerprint;
        and the device that `auto` chose (`cpu` or `gpu`), under the name `device`. Choices of XLA are entered as well,
        also if `client_parallelism` is not `auto`.
    """

    name = "inprocess"

    def __init__(
        self,
        *,
        device: str = "auto",
        client_parallelism: ClientParallelism = "auto",
        clients_per_call: int = _CLIENTS_PER_CALL,
        xla: Xla = "auto",
        choices: dict[str, Any] | None = None,
        cores: int | None = None,
        batched_convolutions: bool | None = None,
        calls: int | None = None,
    ):
        """Builds the engine on a device; the engine is then ready for use.

        Args:
          device: `cpu`; `gpu`, all GPUs; `gpu:N`, one GPU; or `auto`, the CPU or all GPUs: the first call that
            aggregates clients' values times both and keeps the faster. Several GPUs compute parts of the clients side
            by side; a different number of GPUs of one kind changes no bit of the results.
          client_parallelism: `loop` makes one call per client, on several cores; `vectorized` makes one call for
            clients of equal shapes, and falls back to the loop if a computation cannot be stacked; `auto` times both,
            and stacks that XLA compiles where it may, at the first call of each computation and keeps the fastest.
          clients_per_call: largest number of clients that are computed at a time; memory grows with this number.
          xla: where XLA compiles the work of stacked clients: with `auto` on a GPU, with `always` on every device,
            with `never` nowhere. If XLA cannot compile a computation, the engine warns and does without.
          choices: earlier choices of `auto`, by fingerprint, for a resumed run; the engine adds its new choices.
          cores: number of cores to use on a CPU; None for all that this process may use.
          batched_convolutions: whether stacked clients compute convolutions with kernels of their own by the batched
            form (`stacked_convolutions`) or in a loop; by default the batched form on a GPU, which launches fewer
            kernels, and the loop on a CPU, where the loop is two to four times as fast.
          calls: largest number of calls of one computation, such as the number of rounds; None if unknown. For few
            calls `auto` does not try a form whose preparation would cost more than the form could save.

        Raises:
          EngineError: the device is absent.
        """
        self._calls = calls
        self._places = find_places(device)
        self._xla: Xla = xla
        self._batched_convolutions = batched_convolutions
        self._parallelism = client_parallelism
        self._clients_per_call = clients_per_call
        self.choices: dict[str, Any] = {} if choices is None else choices
        # Results of these computations have been used: another mode would round the same sums differently.
        self._used_compiled = {name for name, mode in self.choices.items() if mode == "compiled"}
        self._programs: collections.OrderedDict[int, LoadedProgram] = collections.OrderedDict()
        self._invocation = threading.Lock()
        # Until a device is chosen, calls run on the CPU.
        self._place = self._places[0]
        self._is_placed = len(self._places) == 1
        self._lanes = Lanes(self._place, cores)
        self._closed = False

    @property
    def device(self) -> str:
        """Device that the engine computes on: `cpu`, `gpu:N`, `gpu` for several GPUs, or `auto` for the faster one."""
        if len(self._places) > 1:
            return "auto"
        names = [device.strip("/").lower().replace("cpu:0", "cpu") for device in self._place]
        return names[0] if len(names) == 1 else "gpu"

    @contextlib.contextmanager
    def install(self) -> Iterator[Self]:
        """Sends the TFF computations called in this thread inside the `with` block to this engine."""
        self._check_open()
        with _tff.installed(self):
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
            # Clients' first states, which nothing aggregates, say little of a round.
            has_sums = any(level.aggregations for level in program.program.levels)
            if not self._is_placed and _has_work(program, own) and has_sums:
                self._choose_place(program, shared, own)
        with self.computing():
            if program.mode is None:
                program.mode = self._choose_mode(program, shared, own)
            while True:
                try:
                    result = self._run(program, shared, own, program.mode or "loop")
                    break
                # As text: handlers may keep records, and the error object would keep traced graphs alive.
                except CannotStack as error:
                    _logger.warning("clients are computed one by one, because %s", str(error))
                    program.mode = self.choices[program.fingerprint] = "loop"
                except CannotCompile as error:
                    if program.fingerprint in self._used_compiled:
                        # If the data are at fault, this fails as well.
                        self._run(program, shared, own, "vectorized")
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

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Computes on the engine's device inside the `with` block, and makes other threads wait for the block's end.

        Raises:
          EngineError: the engine is closed.
        """
        with self._invocation, tf.device(self._place[0]):
            self._check_open()
            yield

    @property
    def _may_compile(self) -> bool:
        return self._xla == "always" or (self._xla == "auto" and self._place != CPU)

    def _run(self, program: LoadedProgram, shared: Any, own: Any, mode: Mode) -> Any:
        return program.run(shared, own, mode, self._clients_per_call)

    def _compare(self, program: LoadedProgram, shared: Any, own: Any) -> dict[Mode, float]:
        return program.compare(shared, own, self._clients_per_call, self._may_compile, self._calls)

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
            self._programs[key] = LoadedProgram(
                computation, self._lanes, has_batched_convolutions=self._is_batched(self._place)
            )
            if len(self._programs) > _KEPT_PROGRAMS:
                self._programs.popitem(last=False)
        self._programs.move_to_end(key)
        return self._programs[key]

    def _choose_place(self, program: LoadedProgram, shared: Any, own: Any) -> None:
        """Takes the recorded device, or times the CPU and the GPUs on some of the clients and takes the faster."""
        chosen = self.choices.get(DEVICE_CHOICE)
        if chosen is None:
            seconds = {_kind(place): self._seconds_on(place, program, shared, own) for place in self._places}
            chosen = min(seconds, key=lambda kind: seconds[kind])
            told = ", ".join(f"{kind}: {1000 * spent:.1f} ms" for kind, spent in seconds.items())
            _logger.info("computes on the %s (%s)", chosen, told)
            self.choices[DEVICE_CHOICE] = chosen
        self._place = next(place for place in self._places if _kind(place) == chosen)
        self._lanes.use(self._place)
        for known in self._programs.values():
            known.has_batched_convolutions = self._is_batched(self._place)
        self._is_placed = True

    def _is_batched(self, place: Place) -> bool:
        return place != CPU if self._batched_convolutions is None else self._batched_convolutions

    def _seconds_on(self, place: Place, program: LoadedProgram, shared: Any, own: Any) -> float:
        """Returns the seconds of the faster mode, of those that may be used; infinite if a GPU fails."""
        self._lanes.use(place)
        program.has_batched_convolutions = self._is_batched(place)
        modes: dict[str, Sequence[Mode]] = {"loop": ["loop"], "vectorized": ["vectorized"]}
        forms = modes.get(self._parallelism, ["loop", "vectorized"])
        seconds = []
        try:
            with tf.device(place[0]):
                for mode in forms:
                    with contextlib.suppress(CannotStack):
                        seconds.append(program.time(shared, own, mode, self._clients_per_call))
                return min(seconds) if seconds else program.time(shared, own, "loop", self._clients_per_call)
        except tf.errors.OpError as error:
            # If the data are at fault, the CPU has failed before, or will.
            if place == CPU:
                raise
            _logger.info("the GPU is not used, because %s", str(error).splitlines()[0])
            return math.inf

    def _choose_mode(self, program: LoadedProgram, shared: Any, own: Any) -> Mode | None:
        """Chooses the mode for further calls; None if this call has no clients to time."""
        if not _has_work(program, own):
            return None
        # A fingerprint needs all graphs to be read, so it is computed only when it is used.
        if self.choices and program.fingerprint in self.choices:
            return self.choices[program.fingerprint]
        if self._parallelism == "loop":
            return "loop"
        if self._parallelism == "vectorized":
            return "compiled" if self._may_compile else "vectorized"
        seconds = self._compare(program, shared, own)
        mode = min(seconds, key=lambda name: seconds[name])
        self.choices[program.fingerprint] = mode
        _logger.info(
            "clients are computed %s (%s)",
            _IN_WORDS[mode],
            ", ".join(f"{name}: {1000 * spent:.1f} ms" for name, spent in seconds.items()),
        )
        return mode


def _kind(place: Place) -> str:
    return "cpu" if place == CPU else "gpu"


def _has_work(program: LoadedProgram, own: Any) -> bool:
    """Returns whether a call with these clients' values has clients to compute."""
    has_steps = any(level.clients or level.aggregations for level in program.program.levels)
    return bool(has_steps and own and len(next(iter(own.values()))))
