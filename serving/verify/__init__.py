"""Checks that an export answers correctly.

answers: compares answers
worker: runs in a fresh process, where it loads an export and asks for answers
fresh_process: starts the fresh process and gives it exports
verify: verifies an export as a whole
"""
