"""The native engine: it computes, it fails in time, and it leaves nothing behind."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest
import tensorflow as tf

from tests.places import ROOT
from tff_pdp import _tff
from tff_pdp.engines.native import NativeEngine
from tff_pdp.engines.running import build_engine, running_engine
from tff_pdp.errors import ConfigError, EngineError

pytestmark = pytest.mark.timeout(120)

FEATURES = _tff.TensorType(np.float32, [None, 4])


@_tff.tensorflow_computation(np.int32, FEATURES)
def count_and_sum(rounds, x):
    return rounds + 1, tf.reduce_sum(x)


@_tff.federated_computation(_tff.at_clients(np.int32), _tff.at_clients(FEATURES))
def next_round(rounds, x):
    rounds, totals = _tff.federated_map(count_and_sum, (rounds, x))
    return rounds, _tff.federated_sum(totals)


@_tff.tensorflow_computation(np.int32)
def count_slowly(limit):
    return tf.while_loop(lambda i: i < limit, lambda i: [i + 1], [0])[0]


@_tff.federated_computation(_tff.at_clients(np.int32))
def slow_round(limit):
    return _tff.federated_sum(_tff.federated_map(count_slowly, limit))


@_tff.tensorflow_computation(np.int32)
def fail_on_purpose(x):
    with tf.control_dependencies([tf.debugging.assert_equal(x, 0, message="x must be zero")]):
        return tf.identity(x)


def ones(num_examples):
    return np.ones([num_examples, 4], np.float32)


def process_id_of(engine):
    return engine._worker._process.pid


def is_running(process_id):
    try:
        return pathlib.Path(f"/proc/{process_id}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_gone(process_id, seconds=10.0):
    deadline = time.monotonic() + seconds
    while is_running(process_id) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not is_running(process_id)


def executable(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def start_script(text, **options):
    # JAX, which came with our own import of TensorFlow, has set a log level here that a user's shell does not have.
    environment = {name: value for name, value in os.environ.items() if name != "TF_CPP_MIN_LOG_LEVEL"}
    command = [sys.executable, "-c", textwrap.dedent(text)]
    return subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **options)


@pytest.mark.parametrize("already_set", [{}, {"TF_ENABLE_ONEDNN_OPTS": "1", "TF_NUM_INTRAOP_THREADS": "1"}])
def test_warns_where_tensorflow_was_imported_before_the_settings_that_guarantees_rely_on(already_set):
    process = start_script(
        f"""
        import os, sys, types
        for name in ("TF_ENABLE_ONEDNN_OPTS", "TF_NUM_INTRAOP_THREADS"):
            os.environ.pop(name, None)
        os.environ |= {already_set}
        sys.modules["tensorflow"] = types.ModuleType("tensorflow")
        import tff_pdp
        print(os.environ["TF_ENABLE_ONEDNN_OPTS"], os.environ["TF_NUM_INTRAOP_THREADS"])
        """,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    output, errors = process.communicate(timeout=60)
    assert output == "1 1\n"
    assert ("TensorFlow was imported before tff_pdp" in errors) == (not already_set)


@pytest.fixture(scope="module")
def engine():
    with contextlib.closing(build_engine("native")) as built:
        yield built


def test_carries_client_state_and_ragged_client_data(engine):
    with engine.install():
        states, total = next_round([0, 10, 20], [ones(1), ones(2), ones(3)])
        states, total = next_round(states, [ones(1), ones(2), ones(3)])
    assert (states, total) == ([2, 12, 22], 24.0)


def test_more_cohort_sizes_than_executors_kept(engine):
    with engine.install():
        totals = [next_round([0] * n, [ones(1)] * n)[1] for n in [*range(1, 14), 1]]
    assert totals == [4.0 * n for n in [*range(1, 14), 1]]


def test_a_failing_computation_is_not_retried_and_spares_the_engine(engine):
    with engine.install():
        with pytest.raises(Exception, match="x must be zero"):
            fail_on_purpose(1)
        assert fail_on_purpose(0) == 0


def test_another_thread_installs_for_itself(engine):
    outcomes = []

    def call(installed):
        try:
            with engine.install() if installed else contextlib.nullcontext():
                outcomes.append(next_round([0], [ones(1)])[1])
        except RuntimeError as error:
            outcomes.append(str(error))

    for installed in (True, False):
        thread = threading.Thread(target=call, args=(installed,))
        thread.start()
        thread.join(30)
    assert outcomes[0] == 4.0
    assert "No default context installed" in outcomes[1]


def test_without_an_engine_nothing_runs():
    with pytest.raises(EngineError, match="No engine is installed in this thread"):
        next_round([0], [ones(1)])


def test_built_in_a_thread_that_ends_it_still_runs():
    built = []
    thread = threading.Thread(target=lambda: built.append(build_engine("native")))
    thread.start()
    thread.join(60)
    with contextlib.closing(built[0]) as engine, engine.install():
        assert next_round([0], [ones(2)]) == ([1], 8.0)


def test_two_engines_do_not_share_a_worker(engine):
    with running_engine("native") as other:
        assert process_id_of(other) != process_id_of(engine)
        assert next_round([0], [ones(1)])[1] == 4.0
        os.kill(engine_to_lose := process_id_of(other), signal.SIGKILL)
        assert wait_until_gone(engine_to_lose)
        with engine.install():
            assert next_round([0], [ones(1)])[1] == 4.0


def test_closing_ends_the_worker_and_refuses_calls():
    engine = build_engine("native")
    process_id = process_id_of(engine)
    engine.close()
    engine.close()
    assert wait_until_gone(process_id)
    with engine.install(), pytest.raises(EngineError, match="stopped together with its engine"):
        next_round([0], [ones(1)])


def test_an_engine_nobody_holds_ends_its_worker():
    with build_engine("native").install() as engine:
        process_id = process_id_of(engine)
        del engine
        assert is_running(process_id)
    assert wait_until_gone(process_id)


def test_a_worker_killed_during_a_round_is_an_error_in_time():
    with running_engine("native") as engine:
        killer = threading.Timer(2.0, os.kill, (process_id_of(engine), signal.SIGKILL))
        killer.start()
        started = time.monotonic()
        with pytest.raises(EngineError, match=r"ended during a computation: it was killed by SIGKILL"):
            slow_round([2**31 - 1])
        assert 1.5 < time.monotonic() - started < 30
        with pytest.raises(EngineError, match=r"not running: it was killed by SIGKILL"):
            next_round([0], [ones(1)])


def test_a_worker_that_exits_at_once_says_why(tmp_path):
    binary = executable(tmp_path / "worker", "echo no such library >&2; exit 3")
    with pytest.raises(EngineError, match=r"exited with status 3.*\n?no such library"):
        NativeEngine(worker_binary=binary)


def test_a_worker_that_never_serves_is_stopped_at_the_deadline(tmp_path):
    binary = executable(tmp_path / "worker", f"echo $$ > {tmp_path}/pid; exec sleep 600")
    started = time.monotonic()
    with pytest.raises(EngineError, match=r"not ready within 1\.5 s"):
        NativeEngine(worker_binary=binary, start_timeout_seconds=1.5)
    assert time.monotonic() - started < 60
    assert wait_until_gone(int((tmp_path / "pid").read_text()))


def test_a_missing_worker_is_named(tmp_path):
    with pytest.raises(EngineError, match="nowhere is missing"):
        NativeEngine(worker_binary=tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: build_engine("warp"), ConfigError, r"unknown name 'warp'; known engines: .*native"),
        (lambda: build_engine("native", device="/GPU:0"), EngineError, "contains no CUDA code"),
        (lambda: _tff.check_versions((3, 12), "0.87.0"), EngineError, r"needs Python 3\.11, not 3\.12"),
        (lambda: _tff.check_versions((3, 11), "0.88.0"), EngineError, r"needs tensorflow-federated 0\.87, not 0\.88"),
        (lambda: _tff.check_versions((3, 11), None), EngineError, "is not installed"),
    ],
)
def test_impossible_requests_are_refused(call, error, message):
    with pytest.raises(error, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_importing_is_silent_and_computing_leaves_pipes_closed():
    # `communicate` returns only once nobody holds the pipes any more: an orphan worker would keep them open.
    script = start_script(
        """
        import numpy as np
        from tff_pdp import _tff
        from tff_pdp.engines.running import build_engine

        @_tff.tensorflow_computation(np.int32)
        def double(x):
            return 2 * x

        engine = build_engine("native")
        with engine.install():
            print(double(21), engine._worker._process.pid)
        """,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    output, errors = script.communicate(timeout=150)
    assert (script.returncode, errors) == (0, "")
    result, process_id = output.split()
    assert result == "42"
    assert wait_until_gone(int(process_id))


def test_no_worker_survives_when_we_are_killed():
    script = start_script(
        """
        import time
        from tff_pdp.engines.running import build_engine

        engine = build_engine("native")
        print(engine._worker._process.pid, flush=True)
        time.sleep(600)
        """,
        stdout=subprocess.PIPE,
    )
    process_id = int(script.stdout.readline())
    assert is_running(process_id)
    script.kill()
    script.communicate(timeout=30)
    assert wait_until_gone(process_id)
