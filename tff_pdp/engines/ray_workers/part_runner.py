"""Computes parts of the clients at a worker, and keeps their values until the next calls."""

import collections
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import ray
import tensorflow as tf

from tff_pdp.engines.client_values import ClientValues
from tff_pdp.engines.far_values import Recipe
from tff_pdp.engines.inprocess.clients import arrange
from tff_pdp.engines.inprocess.engine import InProcessEngine
from tff_pdp.engines.inprocess.execution import LoadedProgram
from tff_pdp.engines.inprocess.graphs import Leaves
from tff_pdp.engines.inprocess.parts import Chunk, Mode, clients_of, merged_nodes
from tff_pdp.engines.ray_workers.calls import AddUp, Answer, Bring, Call, Filled, Host, Keep, LevelInputs, Request
from tff_pdp.errors import EngineError

# A worker keeps the values of this many calls, for requests that follow a call.
_KEPT_CALLS = 2
# Largest total size of the examples that a worker keeps from call to call, in bytes.
_KEPT_BYTES = 2**30


class _Part:
    """The clients of one part in a call: values by name, and sums of the last computed level."""

    def __init__(self, values: dict[str, ClientValues], chunks: list[Chunk]):
        self.values, self.chunks = values, chunks
        self.sums: dict[int, list[tf.Tensor]] = {}


class PartRunner:
    """Computes parts of calls with an engine of this process. One request is answered at a time."""

    def __init__(self, host: Host, device: str, cores: int):
        """Starts the engine on a device, with some cores."""
        self._host = host
        self._engine = InProcessEngine(device=device, cores=cores)
        self._parts: collections.OrderedDict[int, dict[int, _Part]] = collections.OrderedDict()
        self._inputs: dict[tuple[int, int], tuple[Leaves, LevelInputs]] = {}
        self._lasting: collections.OrderedDict[Any, tuple[ClientValues, int]] = collections.OrderedDict()
        self._written: dict[Any, ClientValues] = {}

    def answer(self, call: Call, level: int, parts: range, request: Request) -> Answer:
        """Computes parts up to a level, unless they have been computed, and answers a request.

        Raises:
          EngineError: the worker has another computation at the call's address.
        """
        with self._engine.computing():
            program = self._program(call)
            if program.fingerprint != call.fingerprint:
                raise EngineError(
                    "a worker has another version of the computation: install the same package everywhere"
                )
            self._forget_earlier(call.number)
            self._compute(call, program, level, parts)
            return self._result(call, program, level, parts, request)

    def compare(self, call: Call, shared: Mapping[str, Any], clients_per_call: int) -> dict[Mode, float]:
        """Times both ways of computing clients on a call's clients; see `LoadedProgram.compare`."""
        with self._engine.computing():
            program = self._program(call)
            own = {
                name: recipe.load(self._host, rows, program.type_of(name)) for name, (recipe, rows) in call.own.items()
            }
            leaves = {name: [tf.constant(leaf) for leaf in of_name] for name, of_name in shared.items()}
            return program.compare(leaves, own, clients_per_call)

    def _program(self, call: Call) -> LoadedProgram:
        for key, reference in call.setups.items():
            if not self._host.knows(key):
                self._host.learn(key, ray.get(reference))
        return self._engine.load(self._host.computation(call.address))

    def _forget_earlier(self, number: int) -> None:
        if number not in self._parts:
            self._parts[number] = {}
        while len(self._parts) > _KEPT_CALLS:
            self._parts.popitem(last=False)
        self._inputs = {key: inputs for key, inputs in self._inputs.items() if key[0] in self._parts}

    def _compute(self, call: Call, program: LoadedProgram, level: int, parts: range) -> None:
        known = self._parts[call.number]
        for part in parts:
            if part not in known:
                known[part] = self._load(call, program, call.parts[part])
        for number in range(level + 1):
            left = [known[part] for part in parts if number in call.levels and number not in known[part].sums]
            if left:
                inputs = self._inputs_of(call, number)
                run = functools.partial(self._run, program, number, call.mode, inputs)
                functions = [functools.partial(run, part) for part in left]
                collections.deque(program.run_parts(functions, call.parts, call.clients_per_call), maxlen=0)

    def _run(
        self, program: LoadedProgram, number: int, mode: Mode, inputs: tuple[Leaves, LevelInputs], part: _Part
    ) -> None:
        shared, started = inputs
        zeros = [
            tf.fill(leaf.shape, tf.constant(leaf.value)) if isinstance(leaf, Filled) else tf.constant(leaf)
            for leaf in started.sums
        ]
        groups, sums = program.run_part(number, mode, shared, part.values, part.chunks, zeros)
        part.values.update({name: ClientValues(program.type_of(name), own) for name, own in groups.items()})
        part.sums[number] = sums

    def _inputs_of(self, call: Call, number: int) -> tuple[Leaves, LevelInputs]:
        key = (call.number, number)
        if key not in self._inputs:
            inputs: LevelInputs = ray.get(call.levels[number])
            self._inputs[key] = [tf.constant(leaf) for leaf in inputs.shared], inputs
        return self._inputs[key]

    def _load(self, call: Call, program: LoadedProgram, chunks: Sequence[Chunk]) -> _Part:
        positions = clients_of(chunks)
        ends = np.cumsum([len(chunk) for chunk in chunks])
        own_chunks = [np.arange(end - len(chunk), end) for chunk, end in zip(chunks, ends, strict=True)]
        values = {
            name: self._made(recipe, rows[positions], program.type_of(name), call.mode, own_chunks)
            for name, (recipe, rows) in call.own.items()
        }
        return _Part(values, own_chunks)

    def _made(
        self, recipe: Recipe, rows: np.ndarray, member_type: Any, mode: Mode, chunks: list[Chunk]
    ) -> ClientValues:
        """Returns values by a recipe, arranged for the mode; keeps values that later calls use again."""
        of_writer = getattr(recipe, "key_of", lambda rows: None)(rows)
        if of_writer in self._written and len(self._written[of_writer]) == len(rows):
            values = self._written[of_writer].copy()
            arrange({"": values}, [chunks], mode)
            return values
        key = (recipe, rows.tobytes(), mode) if recipe.is_lasting else None
        if key in self._lasting:
            self._lasting.move_to_end(key)
            return self._lasting[key][0]
        values = recipe.load(self._host, rows, member_type)
        arrange({"": values}, [chunks], mode)
        if key is not None:
            self._lasting[key] = values, sum(_num_bytes(leaf) for group in values.groups for leaf in group.leaves)
            while sum(size for _, size in self._lasting.values()) > _KEPT_BYTES:
                self._lasting.popitem(last=False)
        return values

    def _result(self, call: Call, program: LoadedProgram, level: int, parts: range, request: Request) -> Answer:
        known = self._parts[call.number]
        if isinstance(request, AddUp):
            leaves = ((part, known[part].sums[level]) for part in parts)
            nodes = merged_nodes(leaves, lambda first, second: program.merge(level, first, second))
            return [(node, [leaf.numpy() for leaf in sums]) for node, sums in nodes]
        if isinstance(request, Bring):
            return [
                (clients_of(call.parts[part])[group.indices], [leaf.numpy() for leaf in group.leaves], group.stacked)
                for part in parts
                for group in known[part].values[request.name].groups
            ]
        for part in parts:
            self._keep(known[part], part, request)
        return None

    def _keep(self, part: _Part, number: int, request: Keep) -> None:
        values = part.values[request.name]
        stacked = values.copy()
        stacked.arrange([np.arange(len(values))])
        request.writer.write(number, [leaf.numpy() for leaf in stacked.groups[0].leaves])
        key = request.writer.key(number)
        # The part's states of earlier rounds are not asked for again.
        self._written = {
            (store, *place): kept
            for (store, *place), kept in self._written.items()
            if store == key[0] and place[-1] != key[-1]
        }
        self._written[key] = values


def _num_bytes(leaf: Any) -> int:
    return int(np.prod(leaf.shape)) * leaf.dtype.size
