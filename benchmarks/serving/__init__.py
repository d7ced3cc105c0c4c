"""Measures exports, loads and calls of personal models, by layout and number of clients.

layouts: models to export, in every layout
load_probe: loads exports, as a program
load_client: sends requests, as a program
run: all measurements, and the server from outside
"""
