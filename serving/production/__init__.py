"""Files and rollouts for TensorFlow Serving.

exports: exports below a folder; one command that serves them
containers: Compose and Kubernetes, and what can be chosen
kit: the folder with everything, its README
rollout: labels moved, on servers and in files
"""
