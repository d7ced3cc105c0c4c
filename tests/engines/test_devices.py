import pytest
import tensorflow as tf

from tff_pdp.engines import devices
from tff_pdp.errors import EngineError


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setattr(devices, "gpus", lambda: ["one", "another"])
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
