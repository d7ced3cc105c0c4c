import os
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest
import tensorflow as tf

from tests.places import ROOT
from tff_pdp.engines import devices
from tff_pdp.errors import EngineError


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setattr(devices, "gpus", lambda: ["one", "another"])
    monkeypatch.setattr(devices, "_state", {"deterministic at first use": None})
    before = tf.config.experimental.tensor_float_32_execution_enabled()
    yield
    tf.config.experimental.enable_tensor_float_32_execution(before)


@pytest.mark.parametrize(
    ("name", "device"), [("cpu", "/CPU:0"), ("gpu", "/GPU:0"), ("gpu:1", "/GPU:1"), ("auto", "/GPU:0")]
)
def test_the_device_asked_for(two_gpus, name, device):
    assert devices.resolve_device(name) == device


def test_a_gpu_multiplies_with_all_bits(two_gpus):
    tf.config.experimental.enable_tensor_float_32_execution(True)
    devices.resolve_device("gpu")
    assert not tf.config.experimental.tensor_float_32_execution_enabled()


@pytest.mark.parametrize("name", ["gpu:2", "GPU", "gpu:", "tpu", "/GPU:0", ""])
def test_no_other_device_takes_its_place(two_gpus, name):
    with pytest.raises(EngineError, match="device: "):
        devices.resolve_device(name)


def test_auto_without_gpus_is_the_cpu(monkeypatch):
    monkeypatch.setattr(devices, "gpus", list)
    assert devices.resolve_device("auto") == "/CPU:0"
    assert devices.find_places("auto") == [("/CPU:0",)]


@pytest.mark.parametrize(
    ("name", "places"),
    [
        ("cpu", [("/CPU:0",)]),
        ("gpu", [("/GPU:0", "/GPU:1")]),
        ("gpu:1", [("/GPU:1",)]),
        ("auto", [("/CPU:0",), ("/GPU:0", "/GPU:1")]),
    ],
)
def test_all_gpus_compute_together_and_auto_has_two_ways(two_gpus, name, places):
    assert devices.find_places(name) == places


# Bits of sums on a GPU
# ---------------------


def distributions(*names):
    return lambda: [SimpleNamespace(name=name, version="1") for name in names]


@pytest.fixture
def deterministic_gpus(two_gpus, monkeypatch):
    """Two GPUs that were taken after operations were made deterministic; the CPU does their trial."""
    monkeypatch.setattr(devices, "are_operations_deterministic", lambda: True)
    monkeypatch.setattr(devices.metadata, "distributions", distributions("numpy", "nvidia-cudnn-cu11", "nvidia_x_cu11"))
    own = devices.trial_bits
    monkeypatch.setattr(devices, "trial_bits", lambda names: own(["/CPU:0" for _ in names]))
    devices.find_places("gpu")


def test_deterministic_gpus_have_an_arithmetic(deterministic_gpus, monkeypatch, tmp_path):
    driver = tmp_path / "version"
    driver.write_text("NVRM version: 580.1\nGCC version: 12\n")
    monkeypatch.setattr(devices, "_DRIVER", driver)
    found = devices.gpu_arithmetic()
    assert found == devices.gpu_arithmetic()
    assert (found["driver"], found["libraries"]) == ("NVRM version: 580.1", "nvidia-cudnn-cu11 1, nvidia_x_cu11 1")
    assert len(found["trial"]) == 16


def test_unknown_libraries_have_none(deterministic_gpus, monkeypatch):
    monkeypatch.setattr(devices.metadata, "distributions", distributions("numpy", "nvidia-ml-py"))
    assert devices.gpu_arithmetic() is None


def test_gpus_taken_before_have_none(deterministic_gpus, monkeypatch):
    monkeypatch.setattr(devices, "_state", {"deterministic at first use": None})
    with monkeypatch.context() as patch:
        patch.setattr(devices, "are_operations_deterministic", lambda: False)
        devices.find_places("gpu")
        assert devices.gpu_arithmetic() is None
    devices.find_places("gpu")
    assert devices.gpu_arithmetic() is None


def test_a_trial_whose_bits_differ_has_none(deterministic_gpus, monkeypatch):
    own, numbers = devices._trial, iter(range(100))
    monkeypatch.setattr(devices, "_trial", lambda: [*own(), tf.constant(next(numbers) == 3)])
    assert devices.trial_bits(["/CPU:0"] * 2) is None
    assert devices.gpu_arithmetic() is not None, "the fourth trial alone was another"


def test_rounds_run_with_deterministic_operations_and_have_the_same_bits():
    """Noised rounds of silos, one by one, and as stacks with convolutions, on the CPU of a new process."""
    program = """
    from tff_pdp.commands.doctor_rounds import ROUNDS
    from tff_pdp.engines import devices
    from tff_pdp.engines.running import running_engine

    def bits(parallelism, name):
        with running_engine("inprocess", "cpu", client_parallelism=parallelism):
            return ROUNDS[name].run(ROUNDS[name].start()).tobytes()

    rounds = {"loop": "dp_sgd", "vectorized": "convolution"}
    assert not devices.are_operations_deterministic()
    devices.use_deterministic_operations()
    assert devices.are_operations_deterministic()
    once, again = ({mode: bits(mode, name) for mode, name in rounds.items()} for _ in range(2))
    print("same" if once == again else "other bits")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        cwd=ROOT,
        env=os.environ | {"TF_NUM_INTRAOP_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.stdout == "same\n", done.stderr[-2000:]
