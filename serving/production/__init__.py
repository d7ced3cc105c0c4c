"""Writes the files for TensorFlow Serving in production, and moves the labels of versions.

options: options of a deployment
exports: finds exports below a folder; writes `models.config` and a command that serves exports
containers: builds files for Compose and Kubernetes
kit: writes a folder with all files and a README
rollout: moves labels, on servers and in files
"""
