"""Defines the files of an export, checks an export, and runs it.

layout: names and hashes of an export's files
program: finds which ops of a graph run when, and where values come from
graph_checks: checks that a graph does only what it may do
warmup: writes and reads the file of warm-up requests
checks: runs all checks of an export, without running its graph
signatures: checks that a request fits its signature
servable: loads and runs an export
"""
