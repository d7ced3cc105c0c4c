"""The manager over real exports; `test_manager.py` has the rules, without TensorFlow."""

import asyncio
import gc
import shutil
import time
import weakref

import grpc
import numpy as np
import pytest

from serving.errors import RequestError
from serving.saved_model import layout, warmup
from serving.server.manager import ModelManager, ModelSpec
from serving.server.metrics import Metrics
from serving.server.options import BatchingOptions
from serving.tf_serving import ServedModel
from tff_pdp.errors import ServingError


@pytest.fixture
def manager(request, tmp_path):
    batching = getattr(request, "param", BatchingOptions())
    manager = ModelManager([ServedModel("toy", tmp_path)], poll_seconds=0.05, metrics=Metrics(), batching=batching)
    yield manager
    manager.stop()


def wait_for(manager, version, state):
    deadline = time.monotonic() + 20
    while manager.statuses.get("toy", version)[0].state != state:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def wait_for_first_sight(manager, version):
    deadline = time.monotonic() + 20
    while version not in [status.version for status in manager.statuses.get("toy")]:
        assert time.monotonic() < deadline
        time.sleep(0.01)


async def ask(manager, exporter, client_id, number):
    inputs = {"client_id": np.array([client_id], object), "x": exporter.x[number : number + 1]}
    with manager.acquire(ModelSpec("toy")) as version:
        outputs = await version.run("", inputs)
    (answers,) = [array for array in outputs.values() if array.dtype == np.float32]
    return version.version, answers


@pytest.mark.parametrize("manager", [None, BatchingOptions()], ids=["one by one", "batched"], indirect=True)
def test_many_requests_at_once_get_the_answers_of_their_own_client(manager, exporter, export_dir, tmp_path):
    shutil.copytree(export_dir, tmp_path / "1")
    manager.load()
    clients = ["alice", "bob", "stranger"] * 20
    numbers = [index % len(exporter.x) for index in range(len(clients))]

    async def main():
        calls = [ask(manager, exporter, client, number) for client, number in zip(clients, numbers, strict=True)]
        return await asyncio.gather(*calls)

    answers = np.concatenate([answer for _, answer in asyncio.run(main())])
    np.testing.assert_allclose(answers, exporter.expected(clients, exporter.x[numbers]), atol=exporter.rounding())


@pytest.mark.parametrize("manager", [None, BatchingOptions()], ids=["one by one", "batched"], indirect=True)
def test_a_request_with_nan_does_not_spoil_those_beside_it(manager, exporter, export_dir, tmp_path):
    shutil.copytree(export_dir, tmp_path / "1")
    manager.load()
    bad = {"client_id": np.array(["alice"], object), "x": np.full_like(exporter.x[:1], np.nan)}

    async def spoil():
        with manager.acquire(ModelSpec("toy")) as version:
            await version.run("", bad)

    async def main():
        calls = [ask(manager, exporter, "alice", 0) if index % 3 else spoil() for index in range(30)]
        return await asyncio.gather(*calls, return_exceptions=True)

    for index, answer in enumerate(asyncio.run(main())):
        if index % 3:
            assert isinstance(answer, tuple)
            np.testing.assert_allclose(
                answer[1], exporter.expected(["alice"], exporter.x[:1]), atol=exporter.rounding()
            )
        else:
            assert isinstance(answer, RequestError)
            assert answer.code is grpc.StatusCode.INVALID_ARGUMENT
            assert "finite" in answer.message


def test_examples_are_classified_through_the_same_batches(manager, exporter, export_dir, tmp_path):
    shutil.copytree(export_dir, tmp_path / "1")
    manager.load()
    clients = ["alice", "bob", "stranger"] * 4
    numbers = [index % len(exporter.x) for index in range(len(clients))]

    async def classify(client, number):
        serialised = warmup.example(client, exporter.x[number]).SerializeToString()
        with manager.acquire(ModelSpec("toy")) as version:
            return (await version.on_examples("classify", "classify", np.array([serialised], object)))["scores"]

    async def main():
        return await asyncio.gather(*(classify(*call) for call in zip(clients, numbers, strict=True)))

    scores = np.concatenate(asyncio.run(main()))
    np.testing.assert_allclose(scores, exporter.expected(clients, exporter.x[numbers]), atol=exporter.rounding())


def test_a_swap_under_load_fails_no_request_and_frees_the_old_session(manager, exporter, export_dir, tmp_path):
    shutil.copytree(export_dir, tmp_path / "1")
    manager.load()
    with manager.acquire(ModelSpec("toy")) as version:
        session = weakref.ref(version.servable._session)
    del version
    manager.start_watching()
    seen = []

    async def client():
        while seen.count(2) < 100:
            seen.append((await ask(manager, exporter, "alice", 0))[0])

    async def main():
        clients = [asyncio.create_task(client()) for _ in range(8)]
        await asyncio.to_thread(shutil.copytree, export_dir, tmp_path / "2.tmp")
        (tmp_path / "2.tmp").rename(tmp_path / "2")
        await asyncio.wait_for(asyncio.gather(*clients), 60)

    asyncio.run(main())
    assert set(seen) == {1, 2}
    wait_for(manager, 1, "END")
    gc.collect()
    assert session() is None


def test_a_corrupt_version_keeps_the_old_one_and_a_slow_copy_is_tried_again(manager, exporter, export_dir, tmp_path):
    shutil.copytree(export_dir, tmp_path / "1")
    manager.load()
    manager.start_watching()
    shutil.copytree(export_dir, tmp_path / "2.tmp")
    (tmp_path / "2.tmp" / layout.SAVED_MODEL_FILE).write_bytes(b"garbage")
    (tmp_path / "2.tmp").rename(tmp_path / "2")
    wait_for_first_sight(manager, 2)
    wait_for(manager, 2, "END")
    assert layout.SAVED_MODEL_FILE in manager.statuses.get("toy", 2)[0].error
    assert asyncio.run(ask(manager, exporter, "alice", 0))[0] == 1
    # The copy becomes complete in place.
    shutil.copy(export_dir / layout.SAVED_MODEL_FILE, tmp_path / "2" / layout.SAVED_MODEL_FILE)
    wait_for(manager, 2, "AVAILABLE")
    assert asyncio.run(ask(manager, exporter, "alice", 0))[0] == 2


def test_a_first_load_can_be_repeated_when_the_copy_is_complete(manager, export_dir, tmp_path):
    shutil.copytree(export_dir, tmp_path / "1", ignore=shutil.ignore_patterns("variables.index"))
    with pytest.raises(ServingError, match="No version of 'toy' under"):
        manager.load()
    shutil.copytree(export_dir, tmp_path / "1", dirs_exist_ok=True)
    manager.load()
    assert [status.state for status in manager.statuses.get("toy")] == ["AVAILABLE"]


def test_the_first_plain_id_is_warned_of_once_where_ids_are_hashes(manager, exporter, export_dir, tmp_path, caplog):
    shutil.copytree(export_dir, tmp_path / "1")
    card = layout.read_document(tmp_path / "1", layout.MODEL_CARD_FILE)

    async def ask_all(*client_ids):
        for client_id in client_ids:
            await ask(manager, exporter, client_id, 0)

    def said():
        return [record.getMessage() for record in caplog.records if "plain id" in record.getMessage()]

    manager.load()
    # Nothing says that these ids are hashes.
    assert card.get("client_id_kind") != "hashed"
    asyncio.run(ask_all("alice", "nobody"))
    assert said() == []
    with manager.acquire(ModelSpec("toy")) as version:
        version.has_hashed_ids = True
    asyncio.run(ask_all("", "0f" * 16))
    assert said() == []
    asyncio.run(ask_all("alice", "nobody"))
    (text,) = said()
    assert "toy" in text and "tff-pdp client-id" in text
    assert "alice" not in text
