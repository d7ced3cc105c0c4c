"""`tff-pdp doctor`: sound engines pass, and one that fails or computes something else is shown and changes the status.

Tests hand the session's engines to the doctor, which would start its own for every line it prints.
"""

import contextlib
import dataclasses
import json
import math
import types

import grpc
import numpy as np
import pytest
import tensorflow as tf

from tests.rounding import standard_errors
from tff_pdp import _tff
from tff_pdp.cli import main
from tff_pdp.commands import doctor, doctor_rounds
from tff_pdp.engines import devices
from tff_pdp.engines.inprocess import stacked
from tff_pdp.engines.running import running_engine
from tff_pdp.errors import EngineError

# Relative, of the noise's standard deviation, from a draw for each weight of the round.
NOISE = standard_errors() / math.sqrt(2 * (64 + 1) * 10)
KEYS = {"round", "engine", "device", "client_parallelism", "passed", "difference", "noise_stddev", "error"}
NOTHING_TO_COMPARE = "there is no reference to compare with, because the native engine has failed"
NATIVE_LINES = [("native on cpu", "DP FedAvg of tff.learning"), ("native on cpu", "MR-MTL with DP-SGD")]
INPROCESS_LINES = [
    ("inprocess on cpu, loop", "DP FedAvg of tff.learning"),
    ("inprocess on cpu, loop", "MR-MTL with DP-SGD"),
    ("inprocess on cpu, vectorized", "MR-MTL with DP-SGD"),
]


class BrokenContext(_tff.SyncContext):
    """Initial values go through a function, which may raise; all else is as in the sound context."""

    def __init__(self, sound, function):
        self._sound = sound
        self._function = function

    def invoke(self, comp, arg):
        result = self._sound.invoke(comp, arg)
        return result if arg is not None else self._function(result)


@pytest.fixture
def broken(engines, monkeypatch):
    """Functions that break engines, by engine or client parallelism: empty, and filled by a test. No GPU is seen."""
    functions = {}

    @contextlib.contextmanager
    def shared_engine(name, device, **options):
        key = options.get("client_parallelism", name)
        with contextlib.ExitStack() as stack:
            if device == "cpu":
                stack.enter_context(engines[key].install())
            else:
                stack.enter_context(running_engine(name, device, **options))
            if key in functions:
                contexts = _tff.get_context_stack()
                stack.enter_context(contexts.install(BrokenContext(contexts.current, functions[key])))
            yield

    monkeypatch.setattr(doctor, "running_engine", shared_engine)
    monkeypatch.setattr(doctor, "devices", types.SimpleNamespace(gpus=list))
    return functions


def raising(error):
    def fail(result):
        raise error

    return fail


def changing(function):
    """Applies a function to all floats."""

    def change(leaf):
        array = np.asarray(leaf)
        return np.asarray(function(array), array.dtype) if array.dtype.kind == "f" else leaf

    return lambda result: tf.nest.map_structure(change, result)


def run_doctor(capsys):
    """The exit status and what each line on an engine says."""
    status = main(["doctor"])
    captured = capsys.readouterr()
    assert not captured.err
    return status, captured.out.rstrip("\n").split("\n\n")[1].split("\n")


def run_doctor_for_json(capsys):
    """The exit status and the content."""
    status = main(["doctor", "--json"])
    output = capsys.readouterr().out
    assert output.count("\n") == 1
    content = json.loads(output, parse_constant=pytest.fail)
    assert content["healthy"] == all(test["passed"] for test in content["tests"]) == (status == 0)
    for test in content["tests"]:
        assert set(test) == KEYS
        assert test["passed"] == (test["error"] is None)
    return status, content


def rpc_error(native_engine):
    """What the native engine raises where a computation fails."""

    @_tff.tensorflow_computation(np.int32)
    def fail(x):
        with tf.control_dependencies([tf.debugging.assert_equal(x, 0, message="one is not zero")]):
            return tf.identity(x)

    with native_engine.install(), pytest.raises(grpc.RpcError) as caught:
        fail(1)
    return caught.value


def test_every_engine_passes_here(broken, capsys):
    status, content = run_doctor_for_json(capsys)
    assert status == 0
    assert list(content) == ["versions", "gpus", "tests", "healthy"]
    assert content["versions"]["tensorflow-federated"].startswith("0.87.")
    assert content["gpus"] == []
    found = [(test["round"], test["engine"], test["device"], test["client_parallelism"]) for test in content["tests"]]
    assert found == [
        ("dp_fed_avg", "native", "cpu", None),
        ("dp_sgd", "native", "cpu", None),
        ("dp_fed_avg", "inprocess", "cpu", "loop"),
        ("dp_sgd", "inprocess", "cpu", "loop"),
        ("dp_sgd", "inprocess", "cpu", "vectorized"),
    ]
    for test in content["tests"]:
        assert 0 <= test["difference"] <= doctor_rounds.TOLERANCE
        if test["round"] == "dp_fed_avg":
            assert test["noise_stddev"] == pytest.approx(0.1, rel=NOISE)
        else:
            assert test["noise_stddev"] is None


def test_text_has_versions_devices_and_a_line_for_each_test(broken, capsys):
    assert main(["doctor"]) == 0
    about, tests = capsys.readouterr().out.rstrip("\n").split("\n\n")
    assert [line.split()[0] for line in about.split("\n")] == ["python", *doctor.DISTRIBUTIONS, "gpu"]
    assert about.endswith("none that TensorFlow can use")
    for line, (where, title) in zip(tests.split("\n"), NATIVE_LINES + INPROCESS_LINES, strict=True):
        assert line.startswith(f"{where:<30} ok: {title} ")
        assert len(line) <= 130
        assert ("is the reference" in line) == where.startswith("native")
        assert ("differs by " in line) == where.startswith("inprocess")
        assert ("; its noise is 0." in line) == ("FedAvg" in title)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            EngineError("the worker is gone.\nThe end of its log:\nkilled"),
            "the worker is gone. The end of its log: killed",
        ),
        (tf.errors.ResourceExhaustedError(None, None, "out of memory"), "out of memory"),
        (grpc.RpcError("the channel is closed"), "the channel is closed"),
        (grpc.RpcError(), "RpcError"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_an_engine_that_raises_has_failed_and_the_others_are_still_tested(broken, capsys, error, reason):
    broken["loop"] = raising(error)
    status, lines = run_doctor(capsys)
    assert status == 1
    assert [line.split()[3] for line in lines if " ok: " in line] == ["ok:", "ok:", "vectorized"]
    assert lines[2:4] == [f"{where:<30} FAILED: {title}: {reason}" for where, title in INPROCESS_LINES[:2]]


def test_a_failing_native_engine_leaves_nothing_to_compare_with(broken, native_engine, capsys):
    broken["native"] = raising(rpc_error(native_engine))
    status, lines = run_doctor(capsys)
    assert status == 1
    for line, (where, title) in zip(lines, NATIVE_LINES + INPROCESS_LINES, strict=True):
        assert line.startswith(f"{where:<30} FAILED: {title}: ")
        assert len(line) <= 500
        if where == "native on cpu":
            assert "one is not zero" in line
            assert "RPC that terminated" not in line, "the details are enough"
        else:
            assert line.endswith(NOTHING_TO_COMPARE)


def test_an_engine_that_does_not_start_has_failed(broken, monkeypatch, capsys):
    def absent(name, device, **options):
        raise EngineError(f"{name} is absent")

    monkeypatch.setattr(doctor, "running_engine", absent)
    status, content = run_doctor_for_json(capsys)
    assert status == 1
    assert [test["error"] for test in content["tests"]] == ["native is absent"] * 2 + ["inprocess is absent"] * 3


def test_any_other_exception_is_a_bug_and_not_hidden(broken):
    broken["loop"] = raising(ZeroDivisionError("in our own code"))
    with pytest.raises(ZeroDivisionError):
        main(["doctor"])


def test_other_values_are_no_pass(broken, capsys):
    broken["vectorized"] = changing(lambda leaf: leaf + 1e-4)
    status, content = run_doctor_for_json(capsys)
    assert status == 1
    assert [test["passed"] for test in content["tests"]] == [True, True, True, True, False]
    wrong = content["tests"][-1]
    # The values themselves differ by the 1e-4, a norm or a step taken with them by a little more or less; half of it is
    # beyond any rounding.
    assert doctor_rounds.TOLERANCE < 5e-5 < wrong["difference"] < 1e-3
    assert wrong["error"] == f"differs by {wrong['difference']:.1e} from native; allowed: {doctor_rounds.TOLERANCE:.0e}"
    assert run_doctor(capsys)[1][-1].endswith(f"FAILED: MR-MTL with DP-SGD: {wrong['error']}")


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("key", ["native", "loop"])
def test_values_that_are_not_finite_are_no_pass(broken, capsys, key, value):
    broken[key] = changing(lambda leaf: leaf * 0 + value)
    status, content = run_doctor_for_json(capsys)
    assert status == 1
    failed = {test["error"] for test in content["tests"] if not test["passed"]}
    assert failed == {"the result is not finite", *([NOTHING_TO_COMPARE] if key == "native" else [])}
    assert [test["passed"] for test in content["tests"]] == [key == "loop"] * 2 + [False] * 2 + [key == "loop"]


def test_noise_of_another_size_is_no_pass(broken, capsys):
    # The weights are zero in the beginning and stay what they are; the aggregator's noise grows.
    broken["loop"] = changing(lambda leaf: leaf * 2)
    status, content = run_doctor_for_json(capsys)
    assert status == 1
    assert [test["passed"] for test in content["tests"]] == [True, True, False, True, True]
    wrong = content["tests"][2]
    assert wrong["difference"] <= doctor_rounds.TOLERANCE
    assert wrong["noise_stddev"] == pytest.approx(0.2, rel=NOISE)
    assert wrong["error"] == f"the noise's deviation is {wrong['noise_stddev']:.4f}; expected: 0.1"


def test_clients_that_cannot_be_stacked_are_no_pass(broken, monkeypatch, capsys):
    monkeypatch.setattr(stacked, "_wiring_of", lambda graph: None)
    monkeypatch.setattr(doctor, "running_engine", running_engine)
    monkeypatch.setattr(doctor, "_cases", lambda places: [("dp_sgd", "inprocess", "cpu", "vectorized")])
    status, content = run_doctor_for_json(capsys)
    assert status == 1
    assert content["tests"][0]["error"] == "clients were computed one by one, not as a stack"


def test_a_gpu_that_is_not_there_is_an_error_and_never_replaced(broken, monkeypatch, capsys):
    absent = f"gpu:{len(devices.gpus())}"
    listed = [*devices.gpus(), "a card that is gone"]
    cases = list(doctor._cases(["cpu", *(f"gpu:{number}" for number in range(len(listed)))]))
    monkeypatch.setattr(doctor, "devices", types.SimpleNamespace(gpus=lambda: listed))
    monkeypatch.setattr(doctor, "_cases", lambda places: [case for case in cases if case[2] == absent])
    status, lines = run_doctor(capsys)
    assert status == 1
    assert len(lines) == 3
    for line, (where, title) in zip(lines, INPROCESS_LINES, strict=True):
        assert line.startswith(f"{where.replace('cpu', absent):<30} FAILED: {title}: device: '{absent}' is absent")


# One device
# ----------


@pytest.fixture
def one_device(broken, monkeypatch):
    """The engines of the session on one device, with the functions of devices as they are."""
    monkeypatch.setattr(doctor, "devices", devices)
    return broken


def test_one_device_is_compared_with_the_cpu_repeated_and_timed(one_device, capsys):
    assert main(["doctor", "--device", "cpu", "--json"]) == 0
    tests = json.loads(capsys.readouterr().out)["tests"]
    found = [(test["round"], test["engine"], test["client_parallelism"], "seconds" in test) for test in tests]
    assert found == [
        ("dp_fed_avg", "native", None, False),
        ("dp_fed_avg", "inprocess", "loop", True),
        ("dp_sgd", "native", None, False),
        ("dp_sgd", "inprocess", "loop", True),
        ("dp_sgd", "inprocess", "vectorized", True),
        ("convolution", "inprocess", "loop", False),
        ("convolution", "inprocess", "loop", True),
        ("convolution", "inprocess", "vectorized", True),
    ]
    for test in tests:
        assert test["difference"] <= doctor_rounds.ROUNDS[test["round"]].tolerance < 1e-4
        assert test.get("seconds", 1) > 0
    assert main(["doctor", "--device", "auto" if not devices.gpus() else "cpu"]) == 0
    lines = capsys.readouterr().out.rstrip("\n").split("\n\n")[1].split("\n")
    assert ["; a round takes " in line for line in lines] == [False, True, False, True, True, False, True, True]
    assert lines[5].endswith("MR-MTL with DP-SGD, convolutions is the reference")
    assert " from the CPU; a round takes " in lines[-1]


def test_other_values_of_convolutions_are_no_pass(one_device, capsys):
    one_device["vectorized"] = changing(lambda leaf: leaf + 1e-3)
    assert main(["doctor", "--device", "cpu"]) == 1
    last = capsys.readouterr().out.rstrip("\n").split("\n")[-1]
    assert "FAILED: MR-MTL with DP-SGD, convolutions: differs by " in last and " from the CPU; allowed: " in last


def test_a_repetition_with_other_bits_is_no_pass(one_device, monkeypatch, capsys):
    numbers = iter(range(100))
    sound = doctor_rounds.ROUNDS["dp_sgd"]
    drifting = dataclasses.replace(sound, run=lambda start: sound.run(start) + 2.0**-40 * next(numbers))
    monkeypatch.setitem(doctor_rounds.ROUNDS, "dp_sgd", drifting)
    assert main(["doctor", "--device", "cpu"]) == 1
    lines = capsys.readouterr().out.rstrip("\n").split("\n\n")[1].split("\n")
    assert ["other bits when it was repeated" in line for line in lines] == [False] * 3 + [True] * 2 + [False] * 3


@pytest.mark.parametrize("name", ["gpu", "gpu:7", "tpu"])
def test_a_device_that_is_not_there_is_one_line(name, monkeypatch, capsys):
    monkeypatch.setattr(devices, "gpus", list)
    assert main(["doctor", "--device", name]) == 2
    captured = capsys.readouterr()
    assert not captured.out
    assert captured.err.count("\n") == 1 and repr(name) in captured.err
