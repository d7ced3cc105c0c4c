"""Runs the stages of a job.

stages: stages of a job; pieces as bytes and in files
tasks: one task in a worker, its report; workers end with their job
run: runs and watches stages in one Beam pipeline each, or all in one
"""
