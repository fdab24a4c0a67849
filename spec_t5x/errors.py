"""The one exception type for mistakes that the user can mend.

Every message is one line that holds the offending value and the remedy, raised
before any compilation or download. The command line prints it and exits with
status 2; library users can catch it as the ``ValueError`` that it is.
"""


class InputError(ValueError):
    """An argument, file or checkpoint that cannot be used as it is."""
