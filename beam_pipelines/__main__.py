"""The door to the jobs: `python -m beam_pipelines femnist --input DIR --output DIR`; `tff-pdp job` has the same."""

import sys
from collections.abc import Sequence

from tff_pdp import command_line

JOBS = command_line.Table(
    "python -m beam_pipelines",
    "Turn raw data into client datasets, and make up populations and outbreaks.",
    {
        "femnist": "beam_pipelines.commands:Femnist",
        "nist": "beam_pipelines.commands:Nist",
        "celeba": "beam_pipelines.commands:CelebA",
        "fed-emnist": "beam_pipelines.commands:FederatedEmnist",
        "contact-graph": "beam_pipelines.commands:ContactGraph",
        "generate-population": "beam_pipelines.commands:GeneratePopulation",
        "simulate-outbreak": "beam_pipelines.commands:SimulateOutbreak",
        "import-contacts": "beam_pipelines.commands:ImportContacts",
    },
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one job; returns 0 for success, 2 for a problem the user can mend."""
    return command_line.main(JOBS, arguments)


if __name__ == "__main__":
    sys.exit(main())
