"""The ``spec-t5x`` command: argument parsing and printing only."""
