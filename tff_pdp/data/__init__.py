"""Holds the format of client datasets on disk, which jobs write and training reads.

manifest: names of a dataset's files, the dataset's manifest, and the number of rows that one person can change
tfrecord: framing of records, also used for warm-up files
example_codec: encoding and decoding of many examples
shards: positioned reads of records
client_dataset: any client's examples
tfds_copy: a copy that TensorFlow Datasets reads
shuffled_epoch: all examples in random order, even if the examples exceed the memory
"""
