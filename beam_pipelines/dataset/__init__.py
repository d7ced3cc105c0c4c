"""How any job writes a client dataset.

staging: the folder before it has a name; shards, index
accounting: read = kept + dropped, proven
job: run, judge the counts, publish
clients: the job for users with examples
"""
