"""Runs any job that writes a client dataset.

staging: the folder before it gets its name; shards, index
accounting: checks that read = kept + dropped
job: runs the stages, checks the counts, publishes
clients: the job for users with examples
"""
