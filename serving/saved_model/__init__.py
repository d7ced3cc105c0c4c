"""The form of an export, and its checks.

layout: names and hashes of an export's files
program: a graph read as a program
graph_checks: what a graph may do
warmup: warm-up requests and their file
checks: all checks before anything runs
signatures: what a signature asks of a request
servable: loads and runs an export
"""
