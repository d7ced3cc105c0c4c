import signal
import subprocess
import sys
import urllib.request

import pytest

from tff_pdp.cli import main


def test_serve_answers_until_it_is_terminated(export_dir, line_dir, tmp_path):
    models, batching = tmp_path / "models.config", tmp_path / "batching.txt"
    entries = "".join(
        f'config {{ name: "{name}" base_path: "{folder.parent}" model_platform: "tensorflow" }} '
        for name, folder in (("toy", export_dir), ("line", line_dir))
    )
    models.write_text(f"model_config_list {{ {entries} }}")
    batching.write_text("max_batch_size { value: 8 }")
    options = ["--model-config-file", str(models), "--batching-parameters-file", str(batching)]
    command = [sys.executable, "-m", "tff_pdp.cli", "serve", *options, "--rest-port", "0", "--grpc-port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            urls = {}
            for line in server.stdout:
                if "REST" in line:
                    url = line.split()[-1]
                    urls[url.rsplit("/", 1)[1]] = url
                if "development server" in line:
                    break
            for name in ("toy", "line"):
                with urllib.request.urlopen(urls[name], timeout=10) as response:
                    assert b"AVAILABLE" in response.read()
            server.send_signal(signal.SIGTERM)
            _, errors = server.communicate(timeout=20)
        finally:
            server.kill()
    assert server.returncode == 0, errors
    assert "Traceback" not in errors


def test_what_cannot_be_served_is_one_clear_error(tmp_path, capsys):
    assert main(["serve", "--model-base-path", str(tmp_path / "none"), "--rest-port", "0", "--grpc-port", "0"]) == 2
    assert "Cannot read the export directory" in capsys.readouterr().err
    assert main(["serve", "--model-config-file", str(tmp_path / "none")]) == 2
    assert "is not a readable model config" in capsys.readouterr().err
    assert main(["serve", "--model-config-file", str(tmp_path), "--model-name", "m"]) == 2
    assert "--model-name goes with --model-base-path" in capsys.readouterr().err
    arguments = ["serve", "--model-base-path", str(tmp_path), "--model-name", "m", "--max-bytes", "0"]
    assert main(arguments) == 2
    assert "--max-bytes must be a whole number of at least 1, not '0'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("host", "warned"),
    [("0.0.0.0", True), ("192.0.2.1", True), ("example.org", True), ("127.0.0.2", False), ("::1", False)],
)
def test_an_address_that_others_reach_is_warned_about(tmp_path, capsys, host, warned):
    # There is nothing to serve, so that it ends after the warning.
    arguments = ["--model-base-path", str(tmp_path), "--model-name", "m", "--host", host, "--rest-port", "70000"]
    assert main(["serve", *arguments]) == 2
    assert ("is not a loopback address" in capsys.readouterr().err) == warned


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--model-base-path", "a", "--model-config-file", "b"],
        ["--model-base-path", "a", "--no-batching", "--batching-parameters-file", "b"],
    ],
)
def test_options_that_contradict_each_other_are_refused(arguments, capsys):
    assert main(["serve", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "not allowed with argument" in error or "one of the arguments" in error
