"""``spec-t5x train``, ``train-lm``, ``train-heads``, ``distill``: training by a gin file."""

import argparse
import dataclasses
import functools
import pkgutil
from collections.abc import Callable

from spec_t5x import registry
from spec_t5x.cli import settings
from spec_t5x.machine.extras import needed

# Exit status of a run that TrainOptions.max_minutes ended before its steps were taken: that of
# sysexits.h for "try again later".
OUT_OF_TIME = 75


@dataclasses.dataclass(frozen=True)
class Training:
    """A command that calls a gin configurable, which ``configurable`` imports."""

    configurable: Callable[[], Callable]
    HELP: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Adds the command's flags; ``--gin.NAME=VALUE`` is taken by every command."""
        parser.add_argument("--gin_file", required=True, **settings.GIN_FILE)

    def run(self, args: argparse.Namespace) -> int:
        """Trains with what files and flags bind; returns 0 or ``OUT_OF_TIME``."""
        from spec_t5x.cli.gin_files import parse_gin
        from spec_t5x.errors import InputError

        with needed("optax"):
            configurable = self.configurable()
        parse_gin(args.gin_file, args.gin_bindings)
        try:
            result = configurable()
        except TypeError as error:
            reason = str(error).splitlines()[0]
            if "missing" not in reason:
                raise
            raise InputError(f"gin: {reason}: bind it in the gin file") from error
        return 0 if result.finished else OUT_OF_TIME


def _of_labs(place: str) -> Callable[[], Callable]:
    return functools.partial(pkgutil.resolve_name, f"spec_t5x.labs.training.{place}")


_AS = "as a gin file says; the same command resumes it"
# By command of ``contrib``: the model that it trains.
_TRAINED = {"train-lm": "a language model", "train-heads": "draft heads for a target"}
TRAININGS = {
    "train": Training(_of_labs("run_train:train"), f"train a model {_AS}"),
    "distill": Training(_of_labs("run_distill:distill"), f"train a draft for a target {_AS}"),
} | {
    name: Training(
        functools.partial(registry.find, "training", name),
        f"train {_TRAINED.get(name, 'what this command is named for')} {_AS}",
    )
    for name in registry.names("training")
}
