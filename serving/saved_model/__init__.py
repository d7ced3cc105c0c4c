"""Defines the files of an export, checks an export, and runs it.

layout: names and hashes of an export's files
program: finds which nodes of a graph a call may run, and where values come from
graph_checks: checks that a graph does only what it may do
warmup: writes and reads the file of warm-up requests
checks: runs all checks of an export, but not the export's graph
signatures: checks that a request fits its signature
servable: loads and runs an export
"""
