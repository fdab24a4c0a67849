"""``spec-t5x train``, ``train-lm``, ``train-heads``, ``distill``: training by a gin file."""

import argparse
import dataclasses
import functools
import pkgutil
import re
from collections.abc import Callable, Sequence

from spec_t5x import registry
from spec_t5x.cli import settings
from spec_t5x.errors import InputError
from spec_t5x.machine.extras import needed

# Exit status of a run that ``TrainOptions.max_minutes`` ended before its last step; sysexits.h
# has this number for "try again later".
OUT_OF_TIME = 75
# The function that a gin file configures.
_TRAINS = re.compile(r"^(\w+)\.output_dir\b", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Training:
    """Command that trains by a gin configurable, which ``configurable()`` imports and returns."""

    configurable: Callable[[], Callable]
    HELP: str
    # Name of a file in ``gin_configs/runs`` that configures it; None if it has none there.
    file: str | None = None

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Adds the command's flags, those of gin files."""
        of_what = "settings"
        if self.file is not None:
            of_what += f", such as gin_configs/runs/{self.file}, whose header has a command"
        settings.add_gin(parser, of_what, required=True)

    def run(self, args: argparse.Namespace) -> int:
        """Trains as gin files and flags configure; returns 0, or ``OUT_OF_TIME`` if unfinished."""
        from spec_t5x.cli.gin_files import parse_gin

        with needed("optax"):
            configurable = self.configurable()
            # Its import registers settings with gin that a training of another package may bind.
            from spec_t5x.labs.training import run_train  # noqa: F401
            from spec_t5x.labs.training.gin_arguments import built_arguments
        _check_files(args.gin_file, configurable)
        parse_gin(args.gin_file, args.gin_bindings)
        try:
            result = configurable(**built_arguments(configurable, args.gin_bindings))
        except TypeError as error:
            reason = str(error).splitlines()[0]
            if "missing" not in reason:
                raise
            raise InputError(f"gin: {reason}: bind it in the gin file") from error
        return 0 if result.finished else OUT_OF_TIME


def _check_files(files: Sequence[str], configurable: Callable) -> None:
    """Raises ``InputError`` if the gin files configure the training of another command."""
    from spec_t5x.cli.gin_files import read_all

    # An include comes before its file, which may train a draft of what the include configures.
    of_files = [_TRAINS.findall(text) for _, text in read_all(files)]
    configured = next(filter(None, reversed(of_files)), [])
    if not configured or configurable.__name__ in configured:
        return
    trainings = {name: each.configurable().__name__ for name, each in TRAININGS.items()}
    commands = [f"spec-t5x {name}" for name, each in trainings.items() if each in configured]
    if commands:
        raise InputError(f"{files[-1]} is a file for {' or '.join(commands)}: run that command")


def _of_labs(place: str) -> Callable[[], Callable]:
    return functools.partial(pkgutil.resolve_name, f"spec_t5x.labs.training.{place}")


_AS = "as a gin file configures it; the same command resumes an interrupted run"
# The model that each command of ``contrib`` trains, and a gin file.
_TRAINED = {
    "train-lm": ("a language model", "train_lm_target.gin"),
    "train-heads": ("draft heads for a target", "train_t5_heads.gin"),
}
TRAININGS = {
    "train": Training(_of_labs("run_train:train"), f"train a model {_AS}", "first_training.gin"),
    "distill": Training(
        _of_labs("run_distill:distill"), f"train a draft for a target {_AS}", "distill_draft.gin"
    ),
}
for _name in registry.names("training"):
    _what, _file = _TRAINED.get(_name, ("what this command is named for", None))
    _training = functools.partial(registry.find, "training", _name)
    TRAININGS[_name] = Training(_training, f"train {_what} {_AS}", _file)
