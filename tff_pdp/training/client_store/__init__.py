"""Clients' states from round to round.

layout: converts states to bytes and back
shard: one SQLite file of versions
store: the store on disk
inspection: checks a store without changing it
states: states in memory or in a store, behind one interface
"""
