"""Stores clients' states between rounds.

layout: converts states to bytes and back
shard: one SQLite file with versions of states
store: the store on disk, several shards
inspection: checks a store without changing the files
state_files: states as files that workers write and read themselves
states: one interface to states in memory and states in a store
"""
