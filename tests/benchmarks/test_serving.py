"""The benchmark of serving: what it exports is what it says, and its rows have every figure."""

import numpy as np
import pytest

from benchmarks.serving import layouts as latency
from benchmarks.serving import run
from benchmarks.serving.layouts import LAYOUTS, build_models, client_id
from serving.models import STACKED
from serving.server.embedded import EmbeddedServer
from serving.tf_serving import ServedModel

pytestmark = pytest.mark.usefixtures("one_fresh_process")


@pytest.mark.all
def test_every_layout_is_exported_and_called(tmp_path, monkeypatch):
    monkeypatch.setattr(latency, "CALLS", 3)
    monkeypatch.setattr(latency, "WARM_UP_CALLS", 1)
    exports, rows = {}, []
    for layout in (*LAYOUTS, run.PER_CLIENT):
        row, versions = run._export(tmp_path / layout, layout, 3, separate=layout == run.PER_CLIENT)
        rows.append(row)
        exports[layout, 3] = versions
    run._add_latencies(rows, exports)
    assert len(exports[run.PER_CLIENT, 3]) == 3
    for row in rows:
        assert {"layout", "clients", "export_s", "disk_mb", "p50_ms", "p99_ms", "batch_64_p50_ms"} <= row.keys()
        assert 0 < row["p50_ms"] <= row["p99_ms"]
        assert row["mixes_clients"] == (row["layout"] != run.PER_CLIENT)
    base_path = exports[STACKED, 3][0].parent
    with EmbeddedServer([ServedModel(run.MODEL_NAME, base_path)]) as server:
        monkeypatch.setattr(run, "running_server", lambda *_: _Ports(server))
        monkeypatch.setattr(run, "CALLS", 3)
        figures = run.measure_protocols(base_path, run.MODEL_NAME)
    assert figures["p50_ms"].keys() == {"grpc", "rest_columns", "rest_rows"}


def test_a_head_has_1290_values():
    models = build_models(STACKED, 5)
    assert sum(np.prod(stack.shape[1:]) for stack in models.stacked.values()) == 1_290
    assert len({client_id(number) for number in range(5)} & set(models.client_ids)) == 5


class _Ports:
    def __init__(self, server):
        self._server = server

    def __enter__(self):
        return self._server.grpc_port, self._server.rest_port

    def __exit__(self, *_):
        pass
