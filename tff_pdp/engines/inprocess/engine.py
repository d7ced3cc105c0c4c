"""TFF's way into the engine: an execution context that runs computations in this process."""

import collections
import logging
import math
import threading
from typing import Any

import tensorflow as tf

from tff_pdp import _tff
from tff_pdp.engines.inprocess.clients import Mode
from tff_pdp.engines.inprocess.execution import LoadedProgram
from tff_pdp.engines.inprocess.stacked import CannotStack
from tff_pdp.errors import EngineError
from tff_pdp.experiment.config import ClientParallelism
from tff_pdp.runtime.engines.inprocess.lanes import Lanes

_logger = logging.getLogger(__name__)
_KEPT_PROGRAMS = 64


class InProcessContext(_tff.SyncContext):
    """Runs computations one at a time, from whichever thread calls."""

    def __init__(self, device: str, parallelism: ClientParallelism, clients_per_call: int, choices: dict[str, Mode]):
        """Runs on a device by TensorFlow's name of it; `choices` holds what `auto` has chosen, and is added to."""
        self.device = device
        self._parallelism = parallelism
        self._clients_per_call = clients_per_call
        self.choices = choices
        self._programs: collections.OrderedDict[int, LoadedProgram] = collections.OrderedDict()
        self._invocation = threading.Lock()
        self._lanes = Lanes(device)
        self._closed = False

    def invoke(self, comp: Any, arg: Any) -> Any:
        """Runs a computation to its end.

        Returns:
          Values at the server as tensors on the device, in the containers of their type; values at the clients as
          `ClientValues`.

        Raises:
          EngineError: the computation holds something this engine does not run.
          TypeError: an argument is of another type.
          tf.errors.OpError: the computation itself fails.
        """
        with self._invocation, tf.device(self.device):
            if self._closed:
                raise EngineError("The engine has been closed.")
            program = self._load(comp)
            shared, own = program.take(arg)
            if program.mode is None:
                program.mode = self._choose_mode(program, shared, own)
            try:
                return program.run(shared, own, program.mode or "loop", self._clients_per_call)
            except CannotStack as error:
                # As text: handlers may keep records, and the error the graphs that were being traced.
                _logger.warning("clients are computed one by one, because %s", str(error))
                program.mode = self.choices[program.fingerprint] = "loop"
                return program.run(shared, own, "loop", self._clients_per_call)

    @property
    def num_traced(self) -> int:
        """How many TensorFlow functions this context has traced."""
        return sum(program.num_traced for program in self._programs.values())

    def close(self) -> None:
        """Forgets all programs; a computation called after that is an error."""
        with self._invocation:
            self._closed = True
            self._programs.clear()
            self._lanes.close()

    def _load(self, computation: Any) -> LoadedProgram:
        # TFF's computations hash by serialising themselves; the program keeps its computation alive, and its id unique.
        key = id(computation)
        if key not in self._programs:
            self._programs[key] = LoadedProgram(computation, self._lanes)
            if len(self._programs) > _KEPT_PROGRAMS:
                self._programs.popitem(last=False)
        self._programs.move_to_end(key)
        return self._programs[key]

    def _choose_mode(self, program: LoadedProgram, shared: Any, own: Any) -> Mode | None:
        """How to compute clients from now on; None where this call cannot tell."""
        if not program.has_clients or not own or not len(next(iter(own.values()))):
            return None
        # A fingerprint takes reading all graphs, which few engines have a use for.
        if self.choices and program.fingerprint in self.choices:
            return self.choices[program.fingerprint]
        if self._parallelism != "auto":
            return "loop" if self._parallelism == "loop" else "vectorized"
        seconds = program.compare(shared, own, self._clients_per_call)
        is_stacking_faster = seconds.get("vectorized", math.inf) < seconds["loop"]
        mode: Mode = "vectorized" if is_stacking_faster else "loop"
        self.choices[program.fingerprint] = mode
        _logger.info(
            "clients are computed %s (%s)",
            "as stacks" if mode == "vectorized" else "one by one",
            ", ".join(f"{name}: {1000 * spent:.1f} ms" for name, spent in seconds.items()),
        )
        return mode
