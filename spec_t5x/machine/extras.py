"""Optional packages: the part of spec_t5x that imports each, and the extra that installs it."""

import contextlib
import importlib.metadata
import importlib.util
import logging
import re
from collections.abc import Iterator
from types import ModuleType
from typing import NamedTuple

from spec_t5x.errors import InputError

# The core names modules of ``labs`` by their addresses only, since that package may be removed.
HAS_LABS = importlib.util.find_spec("spec_t5x.labs") is not None
# protobuf's message about code that a newer protobuf generated.
_GENCODE = re.compile(r"gencode ((\d+)\.\d+\.\d+) runtime (\d+\.\d+\.\d+)")


class Extra(NamedTuple):
    """Extra ``name`` of spec_t5x that installs a module, and the ``purpose`` of the module."""

    name: str
    purpose: str

    @property
    def remedy(self) -> str:
        """Command that installs the extra."""
        return f"pip install 'spec_t5x[{self.name}]'"


# Extras by the name of the module that is imported.
EXTRAS = {
    "seqio": Extra("tasks", "seqio tasks"),
    "sacrebleu": Extra("eval", "BLEU"),
    "rouge_score": Extra("eval", "ROUGE"),
    "optax": Extra("train", "training"),
    "clu": Extra("train", "TensorBoard's curves"),
    "matplotlib": Extra("plots", "reproduce"),
    "jinja2": Extra("plots", "reproduce"),
    "gradio": Extra("demo", "demo"),
    "torch": Extra("hf", "reading pytorch_model.bin"),
    "transformers": Extra("hf", "reading this tokenizer"),
    "libtpu": Extra("tpu-compile", "compile-tpu"),
    "t5x": Extra("t5x", "T5X launches"),
}


@contextlib.contextmanager
def needed(module: str) -> Iterator[None]:
    """Turns any error of importing ``module`` (of ``EXTRAS``) inside into an ``InputError``."""
    extra = EXTRAS[module]
    with _errors_of_absl() as logged:
        try:
            yield
        except InputError:
            raise
        except ModuleNotFoundError as error:
            raise InputError(
                f"{extra.purpose}: {error.name or module} is not installed: {extra.remedy}"
            ) from error
        # Packages of incompatible versions may raise any error.
        except Exception as error:
            reason = " ".join((logged or [str(error)])[0].split())
            remedy = f"{extra.remedy} --upgrade"
            if match := _GENCODE.search(reason):
                least, major, installed = match[1], int(match[2]), match[3]
                reason = f"what it imports takes protobuf {least}, and {installed} is installed"
                remedy = f"pip install 'protobuf>={least},<{major + 1}'"
            raise InputError(
                f"{extra.purpose}: {module} cannot be imported ({reason[:200]}): {remedy}, and "
                "restart Python"
            ) from error


def imported(name: str) -> ModuleType:
    """Imports a module of a package in ``EXTRAS``; raises ``InputError`` if that fails."""
    with needed(name.partition(".")[0]):
        return importlib.import_module(name)


@contextlib.contextmanager
def _errors_of_absl() -> Iterator[list[str]]:
    """Yields a list that collects, unshown, the errors that absl logs, as TFDS's failed import."""
    messages = []

    def keep(record: logging.LogRecord) -> bool:
        if record.levelno < logging.ERROR:
            return True
        messages.append(record.getMessage())
        return False

    with contextlib.suppress(ImportError):
        # Else the logger would not be of absl's class, and records not name the module they are of.
        import absl.logging  # noqa: F401
    logger = logging.getLogger("absl")
    logger.addFilter(keep)
    try:
        yield messages
    finally:
        logger.removeFilter(keep)


def version(package: str) -> str | None:
    """Returns a package's version; None if it is not installed, as in a source checkout."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
