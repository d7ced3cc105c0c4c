"""How a job's stages run.

stages: what a job is made of; its pieces as bytes and files
tasks: one task in a worker, what it reports; workers end with their job
run: one Beam pipeline for each stage or for all; runs and watches them
"""
