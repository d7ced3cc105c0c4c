"""Files and rollouts for TensorFlow Serving.

options: options of a deployment
exports: finds exports below a folder, and writes one command that serves them
containers: files for Compose and Kubernetes
kit: the folder with all files and a README
rollout: moves labels, on servers and in files
"""
