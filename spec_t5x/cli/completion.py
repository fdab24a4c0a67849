"""Shell completion by argcomplete: ``eval "$(register-python-argcomplete spec-t5x)"``.

The shell runs the command for every TAB: nothing here may import JAX.
"""

import argparse
import os
from collections.abc import Callable, Iterable

from spec_t5x import registry
from spec_t5x.names import AUTO, NO_DRAFT, VERIFIERS

Completer = Callable[..., list[str]]


def answer(parser: argparse.ArgumentParser) -> None:
    """Answers a shell that asks what may come next, and exits; else does nothing."""
    if "_ARGCOMPLETE" in os.environ:
        import argcomplete

        argcomplete.autocomplete(parser)


def models(prefix: str, **_) -> list[str]:
    """Packaged models, and paths."""
    from spec_t5x.checkpoints.packaged import packaged_names

    return _starting(prefix, packaged_names()) + _paths(prefix)


def drafts(prefix: str, **_) -> list[str]:
    """Kinds of drafts, and models."""
    return _starting(prefix, (*registry.names("draft"), NO_DRAFT)) + models(prefix)


def _words(*words: str) -> Completer:
    return lambda prefix, **_: _starting(prefix, words)


# By flag and what its value is called.
COMPLETERS: dict[tuple[str, str], Completer] = {
    ("target", "NAME_OR_DIR"): models,
    ("draft", "NAME_OR_DIR"): drafts,
    ("draft", "NAME[/VERIFIER]"): drafts,
    ("vocabulary", "FILE"): models,
    ("verifier", "NAME"): _words(*VERIFIERS),
    ("gamma", "N"): _words(AUTO),
    ("metric", "NAME"): _words("bleu", "bleu_intl", "rouge"),
}


def add_completers(parser: argparse.ArgumentParser) -> None:
    """Tells the flags of a command what completes them."""
    for flag, action in parser._option_string_actions.items():
        completer = COMPLETERS.get((flag.removeprefix("--"), str(action.metavar)))
        if completer is not None:
            # Where argcomplete looks.
            action.completer = completer


def _starting(prefix: str, words: Iterable[str]) -> list[str]:
    return [word for word in words if word.startswith(prefix)]


def _paths(prefix: str) -> list[str]:
    from argcomplete.completers import FilesCompleter

    return list(FilesCompleter()(prefix))
