"""Clients' states from round to round.

layout: a state as bytes and back
shard: one SQLite file of versions
store: the store on disk
inspection: a store is checked without a change to it
states: states in memory or in a store, behind one interface
"""
