"""Files and rollouts for TensorFlow Serving.

options: options of a deployment
exports: exports below a folder; one command that serves them
containers: Compose and Kubernetes
kit: the folder with everything, its README
rollout: labels moved, on servers and in files
"""
