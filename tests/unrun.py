"""Commands that are read, and not run."""

from tff_pdp import command_line


def parse(table, arguments):
    return command_line._read(*command_line._named(table, arguments, table.prog))
