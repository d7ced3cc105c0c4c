"""Runs any job that writes a client dataset.

staging: the output's folder before it gets its name; shards and index
accounting: counts records; checks that each record read was kept or dropped
job: runs the stages, checks the counts, publishes
clients: the job for users with examples
"""
