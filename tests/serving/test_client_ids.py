"""Keyed hashes of clients' ids: checked against HMAC written out, and one key however many processes ask at once."""

import doctest
import hashlib
import multiprocessing
import stat

import pytest

from serving import client_ids
from serving.client_ids import ClientIdHash
from tests.tiers import amount
from tff_pdp.errors import ServingError

KEY = bytes(range(32))


def hmac_written_out(key, message):
    """RFC 2104, of a key that is shorter than a block of 64 bytes."""
    padded = key.ljust(64, b"\0")
    inner = hashlib.sha256(bytes(byte ^ 0x36 for byte in padded) + message).digest()
    return hashlib.sha256(bytes(byte ^ 0x5C for byte in padded) + inner).hexdigest()


@pytest.mark.parametrize("client_id", ["alice", "silo_03", "é ü", "x" * 500])
def test_an_id_becomes_the_first_half_of_its_hmac(client_id):
    assert ClientIdHash(KEY)(client_id) == hmac_written_out(KEY, client_id.encode())[:32]


def test_the_global_models_id_stays_empty():
    assert ClientIdHash(KEY)("") == ""


def test_another_key_gives_other_ids():
    assert ClientIdHash(KEY)("alice") != ClientIdHash(bytes(32))("alice")


def test_a_fingerprint_tells_keys_apart_and_is_nobodys_id():
    fingerprint = ClientIdHash(KEY).fingerprint
    # A line break: no id in an export has one.
    assert fingerprint == hmac_written_out(KEY, b"fingerprint\n")[:32]
    assert fingerprint != ClientIdHash(bytes(32)).fingerprint
    assert KEY.hex()[:32] != fingerprint != ClientIdHash(KEY)("fingerprint")


def test_the_example_in_the_documentation_is_right():
    results = doctest.testmod(client_ids)
    assert (results.failed, results.attempted) == (0, 1)
    assert ClientIdHash(bytes(32))("alice") == hmac_written_out(bytes(32), b"alice")[:32]


def test_a_key_is_made_once_for_its_owner_alone(tmp_path):
    path = tmp_path / "client_id.key"
    first = ClientIdHash.load_or_create(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    content = path.read_text()
    key, fingerprint = content.split()
    assert len(bytes.fromhex(key)) == 32 and fingerprint == first.fingerprint
    for again in (ClientIdHash.load_or_create(path), ClientIdHash.load(path)):
        assert again("alice") == first("alice") == hmac_written_out(bytes.fromhex(key), b"alice")[:32]
    assert path.read_text() == content
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    assert ClientIdHash.load_or_create(tmp_path / "other.key")("alice") != first("alice")


def _create(path, start, answers):
    start.wait()
    answers.put(ClientIdHash.load_or_create(path)("alice"))


def test_processes_that_make_the_key_at_the_same_moment_all_get_the_same(tmp_path):
    context = multiprocessing.get_context("fork")
    attempts = amount(test=2, all=5)
    for attempt in range(attempts):
        path = tmp_path / f"{attempt}.key"
        start, answers = context.Event(), context.Queue()
        processes = [context.Process(target=_create, args=(path, start, answers)) for _ in range(6)]
        for process in processes:
            process.start()
        start.set()
        found = {answers.get(timeout=30) for _ in processes}
        for process in processes:
            process.join()
        assert found == {ClientIdHash.load(path)("alice")}
    assert len(list(tmp_path.iterdir())) == attempts


def test_a_reader_never_sees_a_part_of_a_key(tmp_path, monkeypatch):
    """The moment in which the key is put in place: it is whole, and what another process put there stays."""
    path = tmp_path / "client_id.key"
    real_link = client_ids.os.link

    def link(source, target):
        assert ClientIdHash.load(source).fingerprint in source.read_text()
        target.write_text(KEY.hex())
        real_link(source, target)

    monkeypatch.setattr(client_ids.os, "link", link)
    assert ClientIdHash.load_or_create(path)("alice") == ClientIdHash(KEY)("alice")
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("content", ["", "00", "zz" * 32, "00" * 33])
def test_a_damaged_key_is_not_replaced(tmp_path, content):
    path = tmp_path / "client_id.key"
    path.write_text(content)
    for read in (ClientIdHash.load, ClientIdHash.load_or_create):
        with pytest.raises(ServingError, match=r"client_id\.key does not hold a key"):
            read(path)
    assert path.read_text() == content


def test_a_key_of_the_first_version_is_read_and_one_that_does_not_fit_its_fingerprint_is_not(tmp_path):
    path = tmp_path / "client_id.key"
    for content in (KEY.hex(), f"{KEY.hex()}\n", f"{KEY.hex()}\n{ClientIdHash(KEY).fingerprint}\n"):
        path.write_text(content)
        assert ClientIdHash.load(path)("alice") == ClientIdHash(KEY)("alice")
    path.write_text(f"{bytes(32).hex()}\n{ClientIdHash(KEY).fingerprint}\n")
    with pytest.raises(ServingError, match=r"client_id\.key does not hold a key for client ids and its fingerprint"):
        ClientIdHash.load(path)


def test_a_key_that_is_no_text_or_missing_is_named(tmp_path):
    path = tmp_path / "client_id.key"
    with pytest.raises(ServingError, match="is missing"):
        ClientIdHash.load(path)
    path.write_bytes(b"\xff" * 32)
    with pytest.raises(ServingError, match="cannot be read"):
        ClientIdHash.load(path)
    with pytest.raises(ServingError, match="cannot be written"):
        ClientIdHash.load_or_create(tmp_path / "absent" / "client_id.key")
    with pytest.raises(ServingError, match="32 bytes; it has 5"):
        ClientIdHash(b"short")


def test_an_id_that_is_no_unicode_is_refused():
    with pytest.raises(ServingError, match=r"Client id '\\ud800' is not valid Unicode"):
        ClientIdHash(KEY)("\ud800")
