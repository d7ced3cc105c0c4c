"""Clients' states from round to round.

layout: a state as bytes and back
shard: one SQLite file of versions
store: the store on disk
states: states in memory or in a store, behind one interface
"""
