"""Runs the jobs: `python -m beam_pipelines femnist --input DIR --output DIR`; `tff-pdp job` has the same commands."""

import functools
import sys

from tff_pdp import command_line

JOBS = command_line.Table(
    "python -m beam_pipelines",
    "Turn raw data into client datasets, generate populations, and simulate outbreaks.",
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
# Runs one command, and returns its exit status.
main = functools.partial(command_line.main, JOBS)

if __name__ == "__main__":
    sys.exit(main())
