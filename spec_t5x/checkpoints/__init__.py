"""Reading, writing and conversion of checkpoints; a failure raises an ``InputError``."""
