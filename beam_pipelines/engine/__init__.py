"""Runs the stages of a job.

stages: describes the stages of a job; stores pieces of tables as bytes and in files
tasks: runs one task in a worker and writes its report; ends workers when their job ends
run: runs stages, each in a Beam pipeline of its own or all in one pipeline, and shows progress
"""
