import asyncio
import contextlib
import types
import urllib.error
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from serving.client.rest_client import RestClient
from serving.errors import invalid_argument
from serving.server import metrics as metrics_module
from serving.server.embedded import EmbeddedServer
from serving.server.metrics import Metrics
from serving.server.rest_server import BodyError
from serving.tf_serving import ServedModel
from tests.rounding import half_a_digit


def _samples(page):
    """Values by name and sorted labels."""
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
    }


def _count(samples, name, **labels):
    return samples.get((name, *sorted(labels.items())), 0)


def test_requests_are_counted_by_model_and_status():
    metrics = Metrics()
    with metrics.request("GRPC", "Predict") as observation:
        observation.model_name = "m"
    with pytest.raises(Exception, match="no"), metrics.request("GRPC", "Predict"):
        raise invalid_argument("no")
    with pytest.raises(ValueError, match="fault"), metrics.request("REST"):
        raise ValueError("fault")
    samples = _samples(metrics.page())
    name = ":tensorflow:serving:request_count"
    assert _count(samples, name, model_name="m", status="OK") == 1
    assert _count(samples, name, model_name="", status="INVALID_ARGUMENT") == 1
    assert _count(samples, name, model_name="", status="INTERNAL") == 1
    latency = ":tensorflow:serving:request_latency_count"
    assert _count(samples, latency, model_name="m", API="Predict", entrypoint="GRPC") == 1
    assert sum(value for key, value in samples.items() if key[0] == latency) == 1


def test_times_are_in_microseconds_under_the_bounds_of_tensorflow_serving(monkeypatch):
    times = iter([9.0, 10.0, 10.002, 11.0])
    monkeypatch.setattr(metrics_module, "time", types.SimpleNamespace(perf_counter=lambda: next(times)))
    metrics = Metrics()
    with metrics.request("GRPC", "Predict") as observation:
        observation.model_name = "m"
        assert asyncio.run(observation.timed(asyncio.sleep(0, "answer"))) == "answer"
    samples = _samples(metrics.page())
    labels = {"model_name": "m", "API": "Predict", "runtime": "TF1"}
    assert _count(samples, ":tensorflow:serving:runtime_latency_sum", **labels) == pytest.approx(2000)
    # 10 * 1.8**9 = 1,983 and 10 * 1.8**10 = 3,570: the first bound above 2,000 is the latter.
    bounds = {
        float(dict(key[1:])["le"]): value
        for key, value in samples.items()
        if key[0] == ":tensorflow:serving:runtime_latency_bucket"
    }
    assert len(bounds) == 34
    assert min(bound for bound, value in bounds.items() if value) == pytest.approx(3570.47, abs=half_a_digit("3570.47"))


def test_batches_and_loads():
    metrics = Metrics()
    metrics.batch_ran("m", [1, 1, 3], 8)
    metrics.load_attempt("m", 1, True, 0.5)
    metrics.load_attempt("m", 2, False, 0.1)
    samples = _samples(metrics.page())
    batching = ":tensorflow:serving:batching_session:"
    assert _count(samples, f"{batching}input_batch_size_count", model_name="m") == 3
    assert _count(samples, f"{batching}input_batch_size_sum", model_name="m") == 5
    assert _count(samples, f"{batching}processed_batch_size_sum", model_name="m") == 8
    loads = ":tensorflow:cc:saved_model:load_attempt_count"
    assert _count(samples, loads, model_path="m/1", status="success") == 1
    assert _count(samples, loads, model_path="m/2", status="fail") == 1
    assert _count(samples, ":tensorflow:cc:saved_model:load_latency", model_path="m/1") == 500_000


def test_requests_that_are_refused_unread_are_counted_by_what_they_are():
    metrics = Metrics()
    for error in (BodyError(413, "large"), BodyError(408, "slow"), BodyError(400, "torn"), ConnectionResetError()):
        with contextlib.suppress(Exception), metrics.request("REST"):
            raise error
    samples = _samples(metrics.page())
    for status in ("RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED", "INVALID_ARGUMENT", "CANCELLED"):
        assert _count(samples, ":tensorflow:serving:request_count", model_name="", status=status) == 1


def test_a_server_tells_its_batches_and_not_what_is_outside_the_api(export_dir, exporter):
    with (
        EmbeddedServer([ServedModel("toy", export_dir.parent)]) as server,
        RestClient(f"127.0.0.1:{server.rest_port}") as client,
    ):
        for num_examples in (2, 3):
            client.predict("toy", ["alice"] * num_examples, exporter.x[:num_examples])
        url = f"http://127.0.0.1:{server.rest_port}"
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{url}/favicon.ico", timeout=10)
        with urllib.request.urlopen(f"{url}/monitoring/prometheus/metrics", timeout=10) as response:
            samples = _samples(response.read())
    for kind in ("input", "processed"):
        name = f":tensorflow:serving:batching_session:{kind}_batch_size"
        assert _count(samples, f"{name}_count", model_name="toy") == 2
        assert _count(samples, f"{name}_sum", model_name="toy") == 5
    counted = {dict(key[1:])["status"] for key in samples if key[0] == ":tensorflow:serving:request_count"}
    assert counted == {"OK"}
    assert _count(samples, ":tensorflow:serving:request_count", model_name="toy", status="OK") == 2


def test_a_server_tells_its_own_metrics_and_no_names_that_requests_made_up(export_dir):
    with EmbeddedServer([ServedModel("toy", export_dir.parent)]) as server:
        url = f"http://127.0.0.1:{server.rest_port}"
        for path in ("/v1/models/toy", "/v1/models/made_up", "/v1/models/made_up/metadata"):
            try:
                urllib.request.urlopen(f"{url}{path}", timeout=10).close()
            except urllib.error.HTTPError as error:
                assert error.code == 404
                error.close()
        with urllib.request.urlopen(f"{url}/monitoring/prometheus/metrics", timeout=10) as response:
            assert response.headers["Content-Type"].startswith("text/plain")
            page = response.read()
    samples = _samples(page)
    counts = ":tensorflow:serving:request_count"
    assert _count(samples, counts, model_name="toy", status="OK") == 1
    assert _count(samples, counts, model_name="", status="NOT_FOUND") == 2
    assert _count(samples, ":tensorflow:cc:saved_model:load_attempt_count", model_path="toy/1", status="success") == 1
    assert b"made_up" not in page
