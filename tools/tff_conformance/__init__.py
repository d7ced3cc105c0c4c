"""Runs TFF's own test files on the in-process engine, and compares the failures with docs/tff_conformance.md.

known: failures that the page lists
run_file: one test file, in a process of its own
__main__: the command, which runs all files and prints the differences
"""
