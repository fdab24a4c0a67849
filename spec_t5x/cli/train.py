"""``spec-t5x train``, ``train-lm``, ``train-heads`` and ``distill``: train as a gin file says."""

import argparse
import dataclasses
import importlib

from spec_t5x.machine.extras import needed

# Exit status of a run that TrainOptions.max_minutes ended before its steps were taken: that of
# sysexits.h for "try again later".
OUT_OF_TIME = 75


@dataclasses.dataclass(frozen=True)
class Training:
    """A command that calls a gin configurable; its fields are those of a command's module."""

    module: str
    function: str
    HELP: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """The command's flags; ``--gin.NAME=VALUE`` is taken by every command."""
        parser.add_argument("--gin_file", action="append", required=True, metavar="FILE")

    def run(self, args: argparse.Namespace) -> int:
        """Trains with what files and flags bind. Exit status 0, or ``OUT_OF_TIME``."""
        from spec_t5x.cli.gin_files import parse_gin
        from spec_t5x.errors import InputError

        with needed("optax"):
            configurable = getattr(importlib.import_module(self.module), self.function)
        parse_gin(args.gin_file, args.gin_bindings)
        try:
            result = configurable()
        except TypeError as error:
            reason = str(error).splitlines()[0]
            if "missing" not in reason:
                raise
            raise InputError(f"gin: {reason}: bind it in the gin file") from error
        return 0 if result.finished else OUT_OF_TIME


_RUN_TRAIN, _RUN_DISTILL = "spec_t5x.labs.training.run_train", "spec_t5x.labs.training.run_distill"
_AS = "as a gin file says; the same command resumes it"
TRAININGS = {
    "train": Training(_RUN_TRAIN, "train", f"train a model {_AS}"),
    "distill": Training(_RUN_DISTILL, "distill", f"train a draft for a target {_AS}"),
    "train-heads": Training(_RUN_TRAIN, "train_heads", f"train draft heads for a target {_AS}"),
    # ``train`` under the name of what its gin file binds.
    "train-lm": Training(_RUN_TRAIN, "train", f"train a language model {_AS}"),
}
