"""Runs a job's stages."""
