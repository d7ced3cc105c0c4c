"""How any job writes a client dataset.

staging: the folder before it has a name
shards: shards, index, dead letters
accounting: read = kept + dropped, proven
job: run, judge the counts, publish
user_rows: users as rows of Arrow batches
clients: the job for users with examples
"""
