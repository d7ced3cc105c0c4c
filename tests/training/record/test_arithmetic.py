"""Whatever decides the bits of a round is in its arithmetic."""

import os

import pytest

from tff_pdp.training.record.arithmetic import arithmetic_of


def here():
    return arithmetic_of("inprocess", "cpu", is_deterministic=True)


def test_the_same_surroundings_have_the_same_arithmetic_and_nothing_equals_what_is_not_repeated():
    assert here() == here()
    once = [arithmetic_of("inprocess", "gpu", is_deterministic=False) for _ in range(2)]
    assert once[0] != once[1]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TF_ENABLE_ONEDNN_OPTS", "0"),
        ("TF_XLA_FLAGS", "--tf_xla_auto_jit=2"),
        ("ONEDNN_MAX_CPU_ISA", "SSE41"),
        ("OMP_NUM_THREADS", "1"),
        ("NPY_DISABLE_CPU_FEATURES", "AVX2"),
        ("NVIDIA_TF32_OVERRIDE", "1"),
        ("CUBLAS_WORKSPACE_CONFIG", ":16:8"),
    ],
)
def test_settings_of_libraries_decide(monkeypatch, name, value):
    before = here()
    monkeypatch.setenv(name, value)
    assert here() != before


def test_so_does_what_a_file_of_flags_holds(monkeypatch, tmp_path):
    flags = tmp_path / "flags"
    flags.write_text("--xla_cpu_max_isa=AVX2")
    monkeypatch.setenv("XLA_FLAGS", str(flags))
    before = here()
    flags.write_text("--xla_cpu_max_isa=SSE4_2")
    assert here() != before


def test_words_of_a_log_decide_nothing(monkeypatch):
    before = here()
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "0" if os.environ.get("TF_CPP_MIN_LOG_LEVEL") != "0" else "1")
    assert here() == before


def test_fewer_processors_decide(monkeypatch):
    before = here()
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    assert here() != {**before, "processors": len(before)} and here()["processors"] == 1


def test_deterministic_operations_decide_on_the_cpu_as_well(monkeypatch):
    before = here()
    monkeypatch.setattr("tff_pdp.engines.devices.are_operations_deterministic", lambda: True)
    assert (before["operations"], here()["operations"]) == ("any", "deterministic")


def test_a_gpu_decides():
    card = arithmetic_of("inprocess", "gpu:0", is_deterministic=True, gpu={"cards": "one 9.0", "trial": "0123"})
    assert card == arithmetic_of("inprocess", "gpu:0", is_deterministic=True, gpu={"cards": "one 9.0", "trial": "0123"})
    other = arithmetic_of("inprocess", "gpu:0", is_deterministic=True, gpu={"cards": "one 9.0", "trial": "4567"})
    assert {name for name in card if card[name] != other[name]} == {"gpu trial"}
