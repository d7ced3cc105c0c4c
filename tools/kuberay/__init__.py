"""Manifests for a Ray cluster on Kubernetes by KubeRay, an image for its pods, and a check of the manifests.

check: compares the manifests with KubeRay's schema
"""
