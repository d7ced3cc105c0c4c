"""How a job's stages run.

stages: what a job is made of; its pieces as bytes and files
tasks: one task in a worker, what it reports; workers end with their job
pipelines: stage after stage, or all as one Beam pipeline
run: runs and watches them
"""
