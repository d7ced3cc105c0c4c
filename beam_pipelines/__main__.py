"""The command line of the jobs: `python -m beam_pipelines femnist --input DIR --output DIR`."""

import argparse
import logging
import os
import sys
from collections.abc import Sequence

from tff_pdp.errors import UserError

EXCHANGES = ("files", "runner")

_EPILOG = """\
flags that are not listed here go to Beam, for example:
  --direct_num_workers=2 --direct_running_mode=multi_processing

example:
  python -m beam_pipelines femnist --input data/femnist/data/all_data --output data/femnist_clients
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one job; returns 0 for success, 2 for a problem the user can mend."""
    options, pipeline_args = build_parser().parse_known_args(arguments)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    # Beam reports optional packages it does not find; ours are the only warnings a user can act on.
    logging.basicConfig(level=logging.ERROR, format="%(message)s")
    logging.getLogger("beam_pipelines").setLevel(logging.WARNING)
    # Imported late: Beam takes seconds to start, and `--help` should not.
    from beam_pipelines.femnist import FemnistOptions, run_femnist

    fields = {key: value for key, value in vars(options).items() if key != "job"}
    fields["input_shape"] = tuple(options.input_shape)
    try:
        summary = run_femnist(FemnistOptions(**fields, pipeline_args=tuple(pipeline_args)))
    except UserError as error:
        print(f"beam_pipelines {options.job}: {error}", file=sys.stderr)
        return 2
    print(summary.table())
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Builds the parser. Its defaults repeat those of `FemnistOptions`, which a test compares."""
    parser = argparse.ArgumentParser(prog="python -m beam_pipelines", description="Turn raw data into client datasets.")
    jobs = parser.add_subparsers(dest="job", required=True, metavar="JOB")
    femnist = jobs.add_parser(
        "femnist",
        help="LEAF FEMNIST JSON -> client dataset",
        description="Reads every LEAF JSON file of a folder, splits each client's examples into train, validation and "
        "test, and writes TFRecord shards from which any one client can be read.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = femnist.add_argument
    add("--input", required=True, metavar="DIR", help="folder of unsplit LEAF files, .json or .json.gz")
    add("--output", required=True, metavar="DIR", help="folder to write; complete only once it holds _SUCCESS")
    add("--input_shape", type=int, nargs=3, default=(28, 28, 1), metavar=("H", "W", "C"), help="default 28 28 1")
    add("--num_classes", type=int, default=62, metavar="N", help="labels are 0..N-1; default 62 (LEAF FEMNIST)")
    add("--test_fraction", type=float, default=0.2, metavar="F", help="expected share of test examples; default 0.2")
    add("--validation_fraction", type=float, default=0.2, metavar="F", help="the same for validation; default 0.2")
    add("--exact_split", action="store_true", help="make each client's shares exact, rounded up to whole examples")
    add("--split_by", default="sample", choices=("sample", "user"), help="divide examples of each client, or clients")
    add("--min_examples_per_client", type=int, default=10, metavar="N", help="smaller clients are dropped; default 10")
    add("--num_shards", type=int, default=8, metavar="N", help="shard files; one must fit a worker's memory; default 8")
    add("--seed", type=int, default=0, metavar="N", help="keys the split; same seed, same bytes; default 0")
    add("--max_bad_fraction", type=float, default=0.01, metavar="F", help="fail above this bad share; default 0.01")
    add("--dead_letters", metavar="DIR", help="where a failing job keeps bad records; default OUTPUT.dead_letters")
    add("--overwrite", action="store_true", help="replace a dataset that was prepared differently")
    add(
        "--exchange",
        default="files",
        choices=EXCHANGES,
        help="files: bounded memory; runner: one pipeline, for clusters",
    )
    add("--runner", default="FnApiRunner", metavar="NAME", help="Beam runner; default FnApiRunner (in this process)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
