"""Several devices of one kind compute clients side by side, and `auto` takes the faster of two kinds.

Logical devices of the CPU stand in for GPUs. TensorFlow fixes their number before it is used, so a process of its own
has them.
"""

import json
import os
import subprocess
import sys
import textwrap

import pytest

from tests.places import ROOT

pytestmark = pytest.mark.timeout(170)

BEGIN = """
import json, logging, sys
import tff_pdp
import numpy as np
import tensorflow as tf

tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 4
)
from tff_pdp import _tff
from tff_pdp.engines.client_values import ClientValues
from tff_pdp.engines.inprocess import engine as module
from tff_pdp.engines.inprocess.execution import LoadedProgram

MATRIX = _tff.TensorType(np.float32, [None, 16])

@_tff.tensorflow_computation(_tff.TensorType(np.float32, [16]), MATRIX)
def step(weights, x):
    return weights + 0.1 * tf.reduce_mean(tf.sin(x * weights), axis=0)

@_tff.federated_computation(_tff.at_clients(_tff.TensorType(np.float32, [16])), _tff.at_clients(MATRIX))
def next_round(weights, x):
    after = _tff.federated_map(step, (weights, x))
    return after, _tff.federated_sum(after), _tff.federated_mean(after)

rng = np.random.default_rng(0)
data = [rng.normal(size=(size, 16)).astype(np.float32) for size in rng.integers(3, 9, size=21)]

def rounds(engine):
    states = [np.ones(16, np.float32)] * 21
    with engine.install():
        for _ in range(3):
            states, total, mean = next_round(states, data)
    return states, total, mean

def bits(outcome):
    states, total, mean = outcome
    return b"".join(np.asarray(leaf).tobytes() for leaf in [*states, total, mean]).hex()

def places(*devices):
    module.find_places = lambda name: [tuple(f"/CPU:{number}" for number in place) for place in devices]
"""


def run(program):
    """Runs the beginning and a program that prints JSON as its last line."""
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + textwrap.dedent(program)],
        cwd=ROOT,
        env=os.environ | {"TF_NUM_INTRAOP_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=160,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_bits_do_not_depend_on_the_number_of_devices_and_each_device_has_its_share():
    found = run("""
    answers = {}
    for number in (1, 2, 3):
        places(range(1, number + 1))
        engine = module.InProcessEngine(device="gpu", client_parallelism="loop")
        outcome = rounds(engine)
        where = [outcome[0].leaves_of(client)[0].device[-5:] for client in range(21)]
        answers[number] = [bits(outcome), {device: where.count(device) for device in sorted(set(where))}, engine.device]
        answers[number].append(outcome[1].device[-5:])
    places([0])
    answers["cpu"] = [bits(rounds(module.InProcessEngine(client_parallelism="loop")))]
    places([1, 2])
    vectorized = rounds(module.InProcessEngine(device="gpu", client_parallelism="vectorized"))
    answers["difference"] = float(max(np.abs(vectorized[1] - outcome[1])))
    print(json.dumps(answers))
    """)
    assert found["1"][0] == found["2"][0] == found["3"][0] == found["cpu"][0]
    # 21 clients in 8 lanes: five lanes have three clients, three have two. Lanes 0, 2, 4 and 6 are on the first of two.
    assert found["1"][1] == {"CPU:1": 21}
    assert found["2"][1] == {"CPU:1": 2 + 2 + 3 + 3, "CPU:2": 3 + 3 + 2 + 3}
    assert found["3"][1] == {"CPU:1": 2 + 3 + 3, "CPU:2": 3 + 3 + 3, "CPU:3": 2 + 2}
    assert [found[number][2] for number in "123"] == ["cpu:1", "gpu", "gpu"]
    assert {found[number][3] for number in "123"} == {"CPU:1"}
    # 21 summands below 2, each with a rounding of 2^-24.
    assert found["difference"] <= 21 * 2 * 2 * 2.0**-24 * 21


def test_auto_keeps_the_faster_device_and_repeats_a_recorded_choice():
    found = run("""
    calls = []
    time = LoadedProgram.time

    def timed(slow):
        def seconds(program, shared, own, mode, clients_per_call):
            time(program, shared, own, mode, clients_per_call)
            device = tf.constant(0.0).device[-5:]
            calls.append((device, mode))
            return 2.0 if device == slow else 1.0
        return seconds

    places([0], [1])
    answers = {}
    for slow in ("CPU:0", "CPU:1"):
        LoadedProgram.time = timed(slow)
        calls.clear()
        choices = {}
        engine = module.InProcessEngine(device="auto", client_parallelism="loop", choices=choices)
        outcome = rounds(engine)
        first = [choices["device"], outcome[1].device[-5:], outcome[0].leaves_of(0)[0].device[-5:], [*calls]]
        calls.clear()
        again = rounds(module.InProcessEngine(device="auto", client_parallelism="loop", choices=choices))
        answers[slow] = [*first, [*calls], again[1].device[-5:], engine.device]
    choices.clear()
    calls.clear()
    rounds(module.InProcessEngine(device="auto", choices=choices))
    answers["modes"] = [sorted(set(calls)), sorted(choices.values())]

    def failing(program, shared, own, mode, clients_per_call):
        if tf.constant(0.0).device.endswith("CPU:1"):
            raise tf.errors.UnimplementedError(None, None, "no deterministic kernel")
        return 3.0

    LoadedProgram.time = failing
    choices = {}
    rounds(module.InProcessEngine(device="auto", client_parallelism="loop", choices=choices))
    answers["failing"] = choices["device"]
    print(json.dumps(answers))
    """)
    trials = [["CPU:0", "loop"], ["CPU:1", "loop"]]
    assert found["CPU:0"] == ["gpu", "CPU:1", "CPU:1", trials, [], "CPU:1", "auto"]
    assert found["CPU:1"] == ["cpu", "CPU:0", "CPU:0", trials, [], "CPU:0", "auto"]
    # Both modes on both devices; clients of different sizes.
    assert found["modes"][0] == [[device, mode] for device in ("CPU:0", "CPU:1") for mode in ("loop", "vectorized")]
    assert len(found["modes"][1]) == 2 and "cpu" in found["modes"][1]
    assert found["failing"] == "cpu"
