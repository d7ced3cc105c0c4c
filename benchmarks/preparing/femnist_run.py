"""Runs the FEMNIST job once and prints how many examples it wrote.

python -m benchmarks.preparing.femnist_run INPUT OUTPUT
"""

import argparse
import json
from pathlib import Path

from beam_pipelines.sources.leaf import FemnistOptions, run_femnist


def main() -> None:
    """Runs the job."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input", type=Path)
    parser.add_argument("output", type=Path)
    options = parser.parse_args()
    summary = run_femnist(FemnistOptions(options.input, options.output, num_shards=16))
    print(json.dumps({"output_rows": sum(summary.manifest.num_examples.values())}))


if __name__ == "__main__":
    main()
