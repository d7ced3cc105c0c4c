"""Checks that an export answers correctly.

answers: compares an export's answers with the right answers
worker: the program of the fresh process, which loads exports and compares their answers
fresh_process: starts the fresh process, and sends requests to verify exports
verify: verifies an export as a whole, and describes its contents
"""
