"""Tools that are not of the product.

digests: what small experiments write, as digests
bounds_seen: how much of their bounds comparisons in tests use
collected_ids: tests that a change lost
audit_deps: pinned packages beside their known vulnerabilities
bazel: targets for tests, and a check without network
flink: a Flink cluster on this machine
"""
