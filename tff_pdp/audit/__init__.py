"""Audits of trained methods: measures what an observer can infer beyond the guarantee.

readings: a silo's noise multiplier, read from one upload and public parameters
uploads: repeats a run's first round, and keeps each silo's own upload
budgets: the budgets that the server can read, beside the true budgets
"""
