"""Replaces `boot` of Beam's container: a task manager starts this program, which becomes a Python SDK worker.

Beam ships `boot` only inside container images. This program fetches no code from the job server and ignores the files
that the pipeline stages, because workers run where the project is installed.
"""

import argparse
import json
import os

import grpc
from apache_beam.portability.api import beam_provision_api_pb2, beam_provision_api_pb2_grpc
from apache_beam.runners.worker import sdk_worker_main
from google.protobuf import json_format


def main() -> None:
    """Asks the task manager for the pipeline's options, then works until the task manager closes the connection."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--id", required=True)
    parser.add_argument("--provision_endpoint", required=True)
    arguments = parser.parse_args()
    with grpc.insecure_channel(arguments.provision_endpoint) as channel:
        # The manager tells its workers apart by this header.
        info = (
            beam_provision_api_pb2_grpc.ProvisionServiceStub(channel)
            .GetProvisionInfo(
                beam_provision_api_pb2.GetProvisionInfoRequest(), metadata=[("worker_id", arguments.id)], timeout=60
            )
            .info
        )
    os.environ.update(
        WORKER_ID=arguments.id,
        PIPELINE_OPTIONS=json.dumps(json_format.MessageToDict(info.pipeline_options)),
        RUNNER_CAPABILITIES=" ".join(info.runner_capabilities),
        LOGGING_API_SERVICE_DESCRIPTOR=str(info.logging_endpoint),
        CONTROL_API_SERVICE_DESCRIPTOR=str(info.control_endpoint),
    )
    sdk_worker_main.main([])


if __name__ == "__main__":
    main()
