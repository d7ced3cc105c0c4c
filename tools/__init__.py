"""Tools for developers that are no part of the product.

digests: digests of the files that small experiments write
bounds_seen: share of their bounds that comparisons in tests use
collected_ids: tests that a change lost
audit_deps: known vulnerabilities of pinned packages
tff_conformance: TFF's own tests on the in-process engine
bazel: targets for tests, and a check without network
flink: a Flink cluster on this machine
kuberay: a Ray cluster on Kubernetes
"""
