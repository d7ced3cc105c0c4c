"""Runs any job that writes a client dataset.

staging: the folder in which a job prepares its output; shards and index
accounting: counts records; checks that each record read was kept or dropped
job: runs the stages, checks the counts, publishes
clients: the job for users with examples
without_client: removes a client from a finished dataset
"""
