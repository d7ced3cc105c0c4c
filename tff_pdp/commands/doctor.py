"""Runs `tff-pdp doctor`: shows versions and devices, and tests each engine against the reference."""

import platform
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import grpc
import numpy as np
import tensorflow as tf

from tff_pdp import _tff
from tff_pdp.commands.doctor_rounds import NOISE_STDDEV, ROUNDS
from tff_pdp.engines import devices
from tff_pdp.engines.running import running_engine
from tff_pdp.errors import EngineError, UserError
from tff_pdp.settings import ClientParallelism

DISTRIBUTIONS = ("tff-pdp", "tensorflow", "tensorflow-federated", "tensorflow-privacy", "dp-accounting")
_SHOWN_CHARACTERS = 400
# Rounds in which clients have `tf.data` data sets, which cannot be stacked.
_ONE_BY_ONE = ("dp_fed_avg",)


class Case(NamedTuple):
    """A test: a round, where it is computed, and whether it is also timed and repeated."""

    round: str
    engine: str
    device: str
    parallelism: ClientParallelism | None
    is_repeated: bool = False


def examine(device: str | None = None) -> tuple[dict[str, Any], str]:
    """Lists versions and devices, and tests the engines.

    Two rounds are computed on each device and compared with the results of TFF's own C++ worker, the reference:

    - `dp_fed_avg`: FedAvg by `tff.learning` with user-level DP, once without noise, to compare weights, and once with
      noise, to check the noise's size. Clients have `tf.data` data sets, and are always computed one by one.
    - `dp_sgd`: MR-MTL with DP-SGD in every client, from known seeds, with clients one by one and stacked.

    With a device, that device alone is tested. A third round, `convolution`, has a small CNN; its reference is this
    engine on the CPU, with clients one by one. Each round is run twice, and the second run is timed. Rounds other than
    `dp_fed_avg` have deterministic operations, as noised training has, and their second run has to give the same bits.

    Args:
      device: `cpu`, `gpu`, `gpu:N`, or `auto`, a GPU where there is one; None for all devices.

    Returns:
      All findings as plain data, with `healthy` true if all tests passed; and all findings as text. Every test has
      `round`, `engine`, `device`, `client_parallelism` (None on the native engine), `passed`, `difference` (the largest
      difference from the reference), `noise_stddev` (in `dp_fed_avg`) and `error`; a value that does not apply is None.
      With a device, tests also have `seconds` of the second round.

    Raises:
      EngineError: the device is absent.
    """
    if device is not None:
        found_device = devices.resolve_device(device)
        device = device if device != "auto" else "cpu" if found_device == "/CPU:0" else "gpu"
    installed = {name: _tff.installed_version(name) or "absent" for name in DISTRIBUTIONS}
    versions = {"python": platform.python_version(), **installed}
    found = devices.gpus()
    references: dict[str, np.ndarray | None] = {}
    cases: Any = _cases(["cpu", *(f"gpu:{number}" for number in range(len(found)))]) if device is None else _on(device)
    tests = [_test(Case(*case), references) for case in cases]
    content = {"versions": versions, "gpus": found, "tests": tests, "healthy": all(test["passed"] for test in tests)}
    return content, _text(content)


def _cases(places: list[str]) -> Iterator[tuple[str, str, str, ClientParallelism | None]]:
    """Yields round, engine, device and client parallelism of each test, the reference first."""
    names = ("dp_fed_avg", "dp_sgd")
    for name in names:
        yield name, "native", "cpu", None
    for device in places:
        for name in names:
            for parallelism in _forms(name):
                yield name, "inprocess", device, parallelism


def _on(device: str) -> Iterator[Case]:
    """Yields the tests of one device, each round's reference first."""
    for name, one in ROUNDS.items():
        if one.is_repeatable and device != "cpu":
            # Before this round's computations are traced, and after the rounds that draw without a seed.
            devices.use_deterministic_operations()
        engine, parallelism = one.reference
        yield Case(name, engine, "cpu", parallelism)  # pyright: ignore[reportArgumentType]
        for parallelism in _forms(name):
            yield Case(name, "inprocess", device, parallelism, is_repeated=True)


def _forms(name: str) -> tuple[ClientParallelism, ...]:
    return ("loop",) if name in _ONE_BY_ONE else ("loop", "vectorized")


def _test(case: Case, references: dict[str, np.ndarray | None]) -> dict[str, Any]:
    """Runs one test; the first test of a round gives the reference of later tests, None if it does not pass."""
    is_reference = case.round not in references
    references.setdefault(case.round, None)
    result: dict[str, Any] = {
        "round": case.round,
        "engine": case.engine,
        "device": case.device,
        "client_parallelism": case.parallelism,
    }
    result.update(passed=False, difference=None, noise_stddev=None, error=None)
    try:
        values, noise, seconds = _run(case)
        reference = values if is_reference else references[case.round]
        if reference is None:
            failed = "native engine" if ROUNDS[case.round].reference[0] == "native" else "CPU"
            raise EngineError(f"there is no reference to compare with, because the {failed} has failed")
        if case.is_repeated:
            result["seconds"] = seconds
        _compare(result, values, reference, noise)
    except (UserError, tf.errors.OpError, grpc.RpcError) as error:
        details = error.details() if isinstance(error, grpc.Call) else None
        return {**result, "error": details or str(error) or type(error).__name__}
    if is_reference:
        references[case.round] = values
    return {**result, "passed": True}


def _run(case: Case) -> tuple[np.ndarray, np.ndarray | None, float | None]:
    """Returns the result of a round, the noise if it is known separately, and seconds of a repetition if there is one.

    Raises:
      EngineError: clients were not stacked, or the repetition had other bits.
    """
    one, choices = ROUNDS[case.round], {}
    options = {} if case.parallelism is None else {"client_parallelism": case.parallelism, "choices": choices}
    noise = seconds = None
    with running_engine(case.engine, case.device, **options):
        start = one.start()
        values = one.run(start)
        if one.noised is not None:
            with np.errstate(invalid="ignore"):  # Infinite on a broken engine, which `_compare` refuses.
                noise = one.noised() - values
        if case.is_repeated:
            started = time.perf_counter()
            again = one.run(start)
            seconds = time.perf_counter() - started
            if one.is_repeatable and again.tobytes() != values.tobytes():
                raise EngineError("the same round had other bits when it was repeated, with deterministic operations")
    if case.parallelism == "vectorized" and choices:
        raise EngineError("clients were computed one by one, not as a stack")
    return values, noise, seconds


def _compare(result: dict[str, Any], values: np.ndarray, reference: np.ndarray, noise: np.ndarray | None) -> None:
    """Enters difference and noise into the result.

    Raises:
      EngineError: the values are not finite, differ too much from the reference, or have noise of another size.
    """
    if not np.isfinite(values).all() or (noise is not None and not np.isfinite(noise).all()):
        raise EngineError("the result is not finite")
    result["difference"] = float(np.max(np.abs(values - reference)))
    if noise is not None:
        result["noise_stddev"] = float(np.std(noise))
    tolerance = ROUNDS[result["round"]].tolerance
    if result["difference"] > tolerance:
        raise EngineError(
            f"differs by {result['difference']:.1e} from {_reference(result['round'])}; allowed: {tolerance:.0e}"
        )
    # 7 standard errors of a standard deviation estimated from this many draws.
    if noise is not None and abs(result["noise_stddev"] / NOISE_STDDEV - 1) >= 7 / np.sqrt(2 * noise.size):
        raise EngineError(f"the noise's deviation is {result['noise_stddev']:.4f}; expected: {NOISE_STDDEV}")


def _reference(name: str) -> str:
    return "native" if ROUNDS[name].reference[0] == "native" else "the CPU"


def _text(content: dict[str, Any]) -> str:
    lines = [f"{name:<22} {version}" for name, version in content["versions"].items()]
    gpus = content["gpus"] or ["none that TensorFlow can use"]
    lines += [f"{'gpu:' + str(number) if content['gpus'] else 'gpu':<22} {name}" for number, name in enumerate(gpus)]
    return "\n".join([*lines, "", *map(_line, content["tests"])])


def _line(test: dict[str, Any]) -> str:
    where = ", ".join(filter(None, [f"{test['engine']} on {test['device']}", test["client_parallelism"]]))
    title = ROUNDS[test["round"]].title
    if not test["passed"]:
        return f"{where:<30} FAILED: {title}: {_shortened(test['error'])}"
    is_reference = test["engine"] == "native" or (_reference(test["round"]) != "native" and "seconds" not in test)
    found = (
        "is the reference" if is_reference else f"differs by {test['difference']:.1e} from {_reference(test['round'])}"
    )
    if test["noise_stddev"] is not None:
        found += f"; its noise is {test['noise_stddev']:.4f}, {NOISE_STDDEV} expected"
    if "seconds" in test:
        found += f"; a round takes {1000 * test['seconds']:.1f} ms"
    return f"{where:<30} ok: {title} {found}"


def _shortened(reason: str) -> str:
    """Shortens a reason to one line: TensorFlow gives it at the end of pages, engines at the beginning."""
    line = " ".join(reason.split())
    half = _SHOWN_CHARACTERS // 2
    return line if len(line) <= _SHOWN_CHARACTERS else f"{line[:half]} ... {line[-half:]}"
