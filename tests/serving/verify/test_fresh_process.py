import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

# TensorFlow Serving's message classes are built at run time, where a type checker cannot see them.
# pyright: reportAttributeAccessIssue=false
from tensorflow_serving.apis import prediction_log_pb2

from serving.saved_model import layout
from serving.saved_model.checks import check_export
from serving.saved_model.servable import load_servable
from serving.verify import fresh_process
from serving.verify.fresh_process import Expectation, FreshProcess
from serving.verify.verify import verify_export
from tests.serving.verify.mutants import edited, rewrite_manifest
from tff_pdp.data.tfrecord import frame, unframe
from tff_pdp.errors import ServingError

X = np.random.default_rng(5).normal(size=(3, 3, 2)).astype(np.float32)
INPUTS = {"client_id": np.array(["alice", "é ü", "nobody"], object), "x": X}


def wait_until(condition, limit=120.0):
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < limit
        time.sleep(0.02)


def is_running(process_id):
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_answers_that_are_right_pass_and_are_described(fresh_process, export_dir, capfd):
    outputs = load_servable(export_dir).predict("predict", INPUTS)
    expectations = [Expectation("predict", INPUTS, outputs), Expectation("", INPUTS, outputs)]
    verified = verify_export(export_dir, fresh_process, expectations)
    assert verified.files["saved_model.pb"] == (export_dir / "saved_model.pb").stat().st_size
    assert verified.total_bytes == sum(path.stat().st_size for path in export_dir.rglob("*") if path.is_file())
    assert {"MatMul", "Softmax", "LookupTableFindV2", "RestoreV2"} < set(verified.ops)
    assert verified.warmup_requests >= 4
    signature = verified.signatures["predict"]
    assert signature["inputs"] == {
        "client_id": {"dtype": "string", "shape": [None]},
        "x": {"dtype": "float32", "shape": [None, 3, 2]},
    }
    assert signature["outputs"]["probabilities"] == {"dtype": "float32", "shape": [None, 4]}
    assert verified.claims["num_clients"] == 3
    assert "predict (client_id: string [n], x: float32 [n, 3, 2]) -> (" in verified.summary()
    assert verified.to_json()["export_dir"] == str(export_dir)
    # What TensorFlow and saved_model_cli print stays in the other process.
    assert capfd.readouterr() == ("", "")


def test_answers_that_differ_are_refused(fresh_process, export_dir):
    outputs = load_servable(export_dir).predict("", INPUTS)
    for signature_name, inputs, right, message in [
        ("", INPUTS, {"probabilities": outputs["probabilities"] + 3e-4}, "probabilities differ by 0.0003"),
        ("", INPUTS, {"probabilities": outputs["probabilities"][:2]}, r"float32 \(3, 4\) instead of float32 \(2, 4\)"),
        ("", INPUTS, {"personalized": ~outputs["personalized"]}, "3 of 3 values that are not equal"),
        ("", INPUTS, {"values": outputs["probabilities"]}, "has no answer 'values'"),
        ("", INPUTS | {"x": X * np.nan}, outputs, "answers with an error: .*x must be finite"),
        ("absent", INPUTS, outputs, '"absent" not found'),
    ]:
        with pytest.raises(ServingError, match=message):
            fresh_process.verify(export_dir, [Expectation(signature_name, inputs, right)])


def test_an_export_that_gives_clients_the_models_of_others_is_refused(fresh_process, export_dir, copy):
    outputs = load_servable(export_dir).predict("", INPUTS)
    vocabulary = next((copy / "assets").iterdir())
    lines = vocabulary.read_text(encoding="utf-8").splitlines(keepends=True)
    vocabulary.write_text("".join([lines[0], *lines[2:], lines[1]]), encoding="utf-8")
    rewrite_manifest(copy)
    check_export(copy)
    fresh_process.verify(copy)
    with pytest.raises(ServingError, match="answers differently from the model: probabilities differ"):
        fresh_process.verify(copy, [Expectation("", INPUTS, outputs)])


@pytest.mark.parametrize("name", [layout.MODEL_CARD_FILE, layout.PRIVACY_REPORT_FILE, layout.WARMUP_FILE])
def test_an_export_without_what_every_export_has_is_refused(fresh_process, copy, name):
    (copy / name).unlink()
    rewrite_manifest(copy)
    # A server can do without.
    load_servable(copy).close()
    with pytest.raises(ServingError, match=f"{copy} has no {name}: it is not a complete export"):
        fresh_process.verify(copy)


def test_an_export_that_runs_nothing_of_itself_is_refused(fresh_process, copy):
    path = copy / layout.WARMUP_FILE
    logs = [prediction_log_pb2.PredictionLog.FromString(one) for one in unframe(path.read_bytes(), "stored")]
    classified = [log for log in logs if log.WhichOneof("log_type") == "classify_log"]
    for kept, signature in (([], "classify"), (classified, "predict")):
        path.write_bytes(b"".join(frame(log.SerializeToString()) for log in kept))
        rewrite_manifest(copy)
        with pytest.raises(ServingError, match=f"{path} has no request for the signature '{signature}'"):
            fresh_process.verify(copy)
    path.write_bytes(b"")
    with edited(copy) as meta_graph:
        for signature in [name for name, one in meta_graph.signature_def.items() if one.inputs]:
            del meta_graph.signature_def[signature]
    with pytest.raises(ServingError, match=f"{path} holds no request"):
        fresh_process.verify(copy)


def test_a_graph_that_does_not_load_is_refused_and_the_process_goes_on(fresh_process, export_dir, copy):
    with edited(copy) as meta_graph:
        for function in meta_graph.graph_def.library.function:
            for node in function.node_def:
                if node.op == "MatMul" or node.op == "BatchMatMulV2":
                    node.op = "Relu"
    check_export(copy)
    process_id = fresh_process._worker.process.pid
    with pytest.raises(ServingError, match=f"{copy} does not load: "):
        fresh_process.verify(copy)
    fresh_process.verify(export_dir)
    assert fresh_process._worker.process.pid == process_id


def test_a_process_that_hangs_or_dies_is_a_refusal_and_is_replaced(export_dir):
    with FreshProcess(timeout_seconds=0.3) as process:
        first = process._worker.process.pid
        os.kill(first, signal.SIGSTOP)
        with pytest.raises(ServingError, match=r"the process that loaded it did not finish within 0\.3 s"):
            process.verify(export_dir)
        assert not is_running(first)
    with FreshProcess() as process:
        first = process._worker.process.pid
        os.kill(first, signal.SIGSTOP)
        killer = threading.Timer(0.2, os.kill, [first, signal.SIGKILL])
        killer.start()
        with pytest.raises(ServingError, match="the process that loaded it was killed by SIGKILL"):
            process.verify(export_dir)
        killer.join()
        process.verify(export_dir)
        assert process._worker.process.pid != first


def test_what_a_dying_process_wrote_is_told(export_dir, monkeypatch, tmp_path):
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho the reason >&2\nread line\nexit 7\n")
    broken.chmod(0o700)
    monkeypatch.setattr(fresh_process.sys, "executable", str(broken))
    with (
        FreshProcess() as process,
        pytest.raises(ServingError, match=r"exited with status 7. The end of its log:\nthe reason"),
    ):
        process.verify(export_dir)


def test_an_interrupted_verification_does_not_leave_its_answer_for_the_next(export_dir, monkeypatch):
    with FreshProcess() as process:
        first = process._worker.process.pid

        def interrupt(*_):
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(fresh_process.select, "select", interrupt)
            with pytest.raises(KeyboardInterrupt):
                process.verify(export_dir)
        assert not is_running(first)


@pytest.mark.parametrize("ending", ["os._exit(0)", "os.kill(os.getpid(), 9)", "sys.exit()"])
def test_the_process_does_not_outlive_its_parent(ending):
    program = (
        "import os, sys\n"
        "from serving.verify.fresh_process import FreshProcess\n"
        "process = FreshProcess()\n"
        "print(process._worker.process.pid, flush=True)\n"
        f"{ending}\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    worker = int(done.stdout)
    # A worker looks for its parent only once it has imported TensorFlow.
    wait_until(lambda: not is_running(worker))


def test_closing_ends_the_process():
    with FreshProcess() as process:
        worker = process._worker.process.pid
        assert is_running(worker)
    assert not is_running(worker)
    process.close()


def test_modules_of_the_training_are_not_imported():
    program = (
        "import sys\n"
        "import serving.verify.worker\n"
        "training = tuple(f'tff_pdp.{room}' for room in ('engines', 'experiment', 'personal_models', 'training'))\n"
        "print([name for name in sys.modules if name.startswith(('tensorflow_federated', *training))])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
