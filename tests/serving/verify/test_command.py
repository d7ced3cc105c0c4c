import contextlib
import json
import shutil
import subprocess
import sys

from serving.__main__ import main
from serving.saved_model import layout
from serving.verify import fresh_process as verifier
from serving.verify.verify import versions_below


def test_verify_describes_exports_and_refuses_others(export_dir, fresh_process, tmp_path, capfd, monkeypatch):
    base = tmp_path / "base"
    shutil.copytree(export_dir, base / "2")
    shutil.copytree(export_dir, base / "10")
    (base / "10" / layout.MODEL_CARD_FILE).write_text("{}")
    assert main(["verify", str(base), str(export_dir)]) == 1
    printed, errors = capfd.readouterr()
    assert errors == ""
    first, *_, last = (line for line in printed.splitlines() if not line.startswith(" "))
    assert first == f"{base}/2: verified"
    assert f"{base}/10: REFUSED: {base}/10/{layout.MODEL_CARD_FILE} does not match the SHA-256" in printed
    assert last == f"{export_dir}: verified"
    (base / "10" / "assets").rename(base / "10" / "moved")
    # Once the command has started a process of its own, the one of all tests does.
    monkeypatch.setattr(verifier, "FreshProcess", lambda timeout: contextlib.nullcontext(fresh_process))
    assert main(["verify", "--json", str(base)]) == 1
    found, refused = json.loads(capfd.readouterr().out)
    assert found["export_dir"] == f"{base}/2"
    assert found["files"]["saved_model.pb"] == (export_dir / "saved_model.pb").stat().st_size
    assert found["signatures"]["predict"]["inputs"]["x"] == {"dtype": "float32", "shape": [None, 3, 2]}
    assert refused == {"export_dir": f"{base}/10", "refused": f"{base}/10/moved is no part of an export; remove it."}


def test_a_path_stands_for_a_version_or_for_all_below(export_dir, tmp_path):
    for name in ("2", "10", "3.tmp", "notes"):
        (tmp_path / name).mkdir()
    assert versions_below(tmp_path) == [tmp_path / "2", tmp_path / "10"]
    assert versions_below(tmp_path, latest=True) == [tmp_path / "10"]
    assert versions_below(export_dir, latest=True) == [export_dir]


def test_commands_that_make_no_sense_end_with_2(tmp_path, capsys):
    for arguments, message in [
        (["verify", str(tmp_path)], "holds neither a saved_model.pb nor numbered versions"),
        (["verify", str(tmp_path / "nowhere")], "No such file"),
        (["client-id", "--key", str(tmp_path / "nowhere"), "alice"], "is missing"),
    ]:
        assert main(arguments) == 2
        assert message in capsys.readouterr().err
    for arguments in ([], ["verify"], ["client-id", "alice"], ["unknown"]):
        assert main(arguments) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_client_ids_are_hashed(tmp_path, capsys):
    key = tmp_path / "key"
    key.write_text("00" * 32)
    assert main(["client-id", "--key", str(key), "alice", ""]) == 0
    # HMAC-SHA256 of "alice" under 32 zero bytes, by `openssl dgst`.
    assert capsys.readouterr().out == "ce3837f76a54a635191b1704ac767226\n\n"


def test_the_command_starts_without_tensorflow():
    program = "import sys\nimport serving.__main__, serving.verify.verify\nprint('tensorflow' in sys.modules)\n"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
    helped = subprocess.run([sys.executable, "-m", "serving", "--help"], capture_output=True, text=True, check=True)
    assert "verify" in helped.stdout and "client-id" in helped.stdout
