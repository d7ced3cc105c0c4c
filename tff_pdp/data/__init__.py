"""A client dataset on disk: jobs write it, and training reads it.

manifest: names of its parts, its manifest, the rows that one person can change
tfrecord: framing of records, which warm-up files have too
example_codec: many examples to bytes and back
shards: positioned reads of records
client_dataset: any client's examples
shuffled_epoch: all examples in random order, larger than memory
"""
