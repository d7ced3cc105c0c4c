"""What preparing data costs, beside scripts in one process that do the same."""
