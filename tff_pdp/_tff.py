"""Imports TensorFlow Federated quietly, checks its version, and gives stable names to TFF's symbols.

TFF moves its public symbols between releases. All other modules import TFF's symbols from this module, so a new
release changes this file alone. Importing this module also removes the execution context that TFF installs at import:
computations run only inside an engine (`tff_pdp.engines.running`).
"""

import contextlib
import gc
import importlib.metadata
import inspect
import logging
import pathlib
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

from tff_pdp.errors import EngineError

SUPPORTED_PYTHON = (3, 11)
SUPPORTED_TFF = "0.87."
_INSTALL = f"run pip install --no-deps -r {pathlib.Path(__file__).with_name('requirements.txt')}"


def check_versions(python: tuple[int, int], federated: str | None) -> None:
    """Checks that this package supports the versions of Python (major, minor) and TFF (None if not installed).

    Raises:
        EngineError: a version is not supported; the message has the version found and the version required.
    """
    if python != SUPPORTED_PYTHON:
        raise EngineError(f"tff_pdp needs Python 3.11, not {python[0]}.{python[1]}.")
    if federated is None:
        raise EngineError(f"tensorflow-federated is not installed: {_INSTALL}.")
    if not federated.startswith(SUPPORTED_TFF):
        raise EngineError(f"tff_pdp needs tensorflow-federated 0.87, not {federated}: {_INSTALL}.")


def installed_version(distribution: str) -> str | None:
    """Returns the version of a package; None if the package is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _is_not_spam(record: logging.LogRecord) -> bool:
    # TFF's secure sums leave assertion ops unused in Python though the graph runs them; TensorFlow logs each of them
    # as an ERROR with a stack trace, hundreds of lines per computation. Nothing else is dropped at this level.
    return "Object was never used" not in str(record.msg)


# Warnings from these two are addressed to TensorFlow's developers (pfor fallbacks, AutoGraph, retracing). ERROR stays.
logging.getLogger("absl").setLevel(logging.ERROR)
logging.getLogger("tensorflow").setLevel(logging.ERROR)
logging.getLogger("tensorflow").addFilter(_is_not_spam)

check_versions(sys.version_info[:2], installed_version("tensorflow-federated"))

import tensorflow_federated as tff  # noqa: E402
from tensorflow_federated.proto.v0 import executor_pb2_grpc  # noqa: E402
from tensorflow_federated.python.learning.models import reconstruction_model  # noqa: E402

CLIENTS = tff.CLIENTS
SERVER = tff.SERVER

# Typed as Any: their own annotations do not say that a decorated function becomes a Computation.
federated_computation: Any = tff.federated_computation
tensorflow_computation: Any = tff.tensorflow.computation

federated_aggregate = tff.federated_aggregate
federated_broadcast = tff.federated_broadcast
federated_eval = tff.federated_eval
federated_map = tff.federated_map
federated_max = tff.federated_max
federated_mean = tff.federated_mean
federated_min = tff.federated_min
federated_sum = tff.federated_sum
federated_value = tff.federated_value
federated_zip = tff.federated_zip

Computation = tff.Computation
FederatedType = tff.FederatedType
FunctionType = tff.FunctionType
SequenceType = tff.SequenceType
StructType = tff.StructType
StructWithPythonType = tff.StructWithPythonType
TensorType = tff.TensorType
Type = tff.Type
to_type = tff.to_type
Struct = tff.structure.Struct
from_container = tff.structure.from_container
iter_elements = tff.structure.iter_elements
to_elements = tff.structure.to_elements
tensorflow_to_type = tff.types.tensorflow_to_type
to_container = tff.types.type_to_py_container

AggregationProcess = tff.templates.AggregationProcess
UnweightedAggregationFactory = tff.aggregators.UnweightedAggregationFactory
DifferentiallyPrivateFactory = tff.aggregators.DifferentiallyPrivateFactory
SumFactory = tff.aggregators.SumFactory
UnweightedMeanFactory = tff.aggregators.UnweightedMeanFactory
concat_factory = tff.aggregators.concat_factory

LearningProcess = tff.learning.templates.LearningProcess
ClientWeighting = tff.learning.ClientWeighting
ReconstructionModel = tff.learning.models.ReconstructionModel
ReconstructionBatchOutput = reconstruction_model.ReconstructionBatchOutput
FunctionalModel = tff.learning.models.FunctionalModel
build_sgdm = tff.learning.optimizers.build_sgdm
build_fed_recon = tff.learning.algorithms.build_fed_recon
build_unweighted_fed_avg = tff.learning.algorithms.build_unweighted_fed_avg

AsyncExecutionContext = tff.framework.AsyncExecutionContext
ExecutorFactory = tff.framework.ExecutorFactory
RemoteExecutor = tff.framework.RemoteExecutor
RemoteExecutorGrpcStub = tff.framework.RemoteExecutorGrpcStub
ExecutorGroupStub = executor_pb2_grpc.ExecutorGroupStub
SyncContext = tff.framework.SyncContext
# The parts of a computation, which the in-process engine interprets.
Block = tff.framework.Block
Call = tff.framework.Call
CompiledComputation = tff.framework.CompiledComputation
Intrinsic = tff.framework.Intrinsic
Lambda = tff.framework.Lambda
Literal = tff.framework.Literal
Reference = tff.framework.Reference
Selection = tff.framework.Selection
StructBlock = tff.framework.Struct
to_call_dominant = tff.framework.to_call_dominant
# TFF's wheels contain no cryptography: the secure sums become plain ones, with the checks of their bounds.
replace_secure_intrinsics = tff.backends.test.replace_secure_intrinsics_with_bodies
compile_to_native = tff.backends.native.desugar_and_transform_to_native
transform_args = tff.tensorflow.transform_args
transform_result = tff.tensorflow.transform_result
get_context_stack = tff.framework.get_context_stack
set_default_context = tff.framework.set_default_context


def at_clients(member: object) -> tff.FederatedType:
    """Returns the TFF type of one value per client; `member` is the value's type, as `to_type` accepts it."""
    return tff.FederatedType(tff.to_type(member), tff.CLIENTS)


def at_server(member: object) -> tff.FederatedType:
    """Returns the TFF type of one value at the server; `member` is the value's type, as `to_type` accepts it."""
    return tff.FederatedType(tff.to_type(member), tff.SERVER)


@contextlib.contextmanager
def installed(context: SyncContext) -> Iterator[None]:
    """Sends the computations that this thread calls inside the `with` block to a context; blocks may end in any order.

    TFF's own `install` ends by removing the newest context, even if a later block has installed that one. A block ends
    out of order if only a generator or an `ExitStack` keeps the block open, and that object is dropped.
    """
    # The list of this thread: an abandoned generator may be ended by another thread, which has a list of its own.
    stack: list[Any] = get_context_stack()._stack  # pyright: ignore[reportAttributeAccessIssue, reportAssignmentType]
    stack.append(context)
    try:
        yield
    finally:
        # The newest of equal entries: the order of the entries that stay is the same for each of them.
        place = next(place for place in reversed(range(len(stack))) if stack[place] is context)
        del stack[place]


def worker_binary() -> pathlib.Path:
    """Returns the path of the C++ worker in TFF's wheel."""
    return pathlib.Path(tff.__file__).parent / "data" / "worker_binary"


# `AsyncExecutionContext.invoke` retries for ever if the connection fails; this function makes one attempt.
invoke_once = inspect.unwrap(AsyncExecutionContext.invoke)


class NoEngineContext(SyncContext):
    """The execution context outside of any engine; an attempt to run a computation raises an error."""

    def invoke(self, comp: object, arg: object) -> NoReturn:
        """Always raises an EngineError."""
        del comp, arg
        raise EngineError(
            "No engine is installed in this thread: call the computation inside "
            "`with tff_pdp.engines.running.running_engine():`."
        )


# At import TFF installs a context that starts its C++ worker at the first call and stops it from `__del__`. At
# interpreter exit that `__del__` finds its modules already gone: it prints an AttributeError and leaves the worker
# running with our stdout open. Replacing the context here, and collecting it now, means that worker never exists.
set_default_context(NoEngineContext())
gc.collect()
