import pytest

from serving.server.options import BatchingOptions, read_batching_file
from tff_pdp.errors import ServingError


@pytest.fixture
def read(tmp_path):
    def parse(text):
        path = tmp_path / "batching.txt"
        path.write_text(text)
        return read_batching_file(path)

    return parse


def test_the_fields_that_count_are_read_and_the_others_accepted(read):
    text = """
        # As in TensorFlow Serving's guide.
        max_batch_size { value: 128 }
        batch_timeout_micros { value: 0 }
        max_enqueued_batches { value: 1000000 }
        num_batch_threads: { value: 8 }
        thread_pool_name { value: "pool" }
        enable_large_batch_splitting { value: true }
        pad_variable_length_inputs: true
        allowed_batch_sizes: 32
        allowed_batch_sizes: [64, 128]
    """
    assert read(text) == BatchingOptions(128, 1000000, 8, (32, 64, 128))


def test_what_is_not_set_keeps_its_default(read):
    assert read("") == BatchingOptions()
    assert read("num_batch_threads { value: 2 }") == BatchingOptions(num_batch_threads=2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_batch_sise { value: 1 }", "batching.txt is not a readable batching parameters file: 1:1"),
        ("max_batch_size { value: 0 }", "batching.txt: max_batch_size must be positive; was 0"),
        ("max_enqueued_batches { value: -1 }", "max_enqueued_batches must be positive"),
        ("num_batch_threads {}", "num_batch_threads must be positive; was 0"),
        ("allowed_batch_sizes: [2, 8] max_batch_size { value: 16 }", "last entry was 8; expected 16"),
        ("allowed_batch_sizes: [8, 8, 64]", "must be positive and increasing"),
        ("allowed_batch_sizes: [0, 64]", "must be positive and increasing"),
    ],
)
def test_what_is_wrong_is_one_clear_error(read, text, message):
    with pytest.raises(ServingError, match=message):
        read(text)


def test_a_missing_file_is_one_clear_error(tmp_path):
    with pytest.raises(ServingError, match="No such file"):
        read_batching_file(tmp_path / "batching.txt")
