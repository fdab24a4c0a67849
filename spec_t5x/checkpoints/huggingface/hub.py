"""Checkpoints by their names on the Hugging Face Hub: OWNER/NAME, or OWNER/NAME@REVISION.

``huggingface_hub`` downloads, so its environment variables apply: HF_HOME, HF_TOKEN,
HF_HUB_OFFLINE and the others. Cached files are not downloaded again; a process asks the Hub once
for the commit of a branch, and uses the cached commit if there is no network.
"""

import contextlib
import functools
import itertools
import logging
import re
import sys
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

from spec_t5x.checkpoints.huggingface import weight_files
from spec_t5x.checkpoints.huggingface.generation_config import GENERATION_NAME
from spec_t5x.checkpoints.storage.files import CONFIG_NAME
from spec_t5x.data.mapped_vocabulary import SUFFICIENT
from spec_t5x.errors import HUB_MODELS, InputError, one_line

# Files that are read besides the weights.
_SMALL_FILES = (
    *(CONFIG_NAME, GENERATION_NAME, weight_files.ADAPTER_NAME, *itertools.chain(*SUFFICIENT)),
    *("tokenizer_config.json", "tokenizer.*.json", "special_tokens_map.json", "added_tokens.json"),
)
# Names of models on the Hub: OWNER/NAME, or OWNER/NAME@REVISION.
NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*(@[^@:,\s]+)?", re.ASCII)

log = logging.getLogger(__name__)


@functools.cache
def snapshot(name: str) -> Path:
    """Downloads a checkpoint without its weights; returns its directory in the Hub's cache.

    A process asks once for each name, and so reads one commit, whose hash names the directory.
    """
    directory = _download(name, name.partition("@")[2] or None, _SMALL_FILES)
    HUB_MODELS[str(directory)] = name, command(name)
    if not (directory / CONFIG_NAME).is_file():
        reason = weight_files.unread(directory) or (
            f"has no {CONFIG_NAME}: give the name of a T5 that transformers can load, or run "
            f"`{command(name)}` where there is a network"
        )
        raise InputError(f"{name} {reason}")
    return directory


def has_weights(name: str) -> bool:
    """Tells whether all weights are in ``snapshot``'s directory."""
    with contextlib.suppress(InputError):
        weight_files.find_files(snapshot(name))
        return True
    return False


def download_weights(*names: str) -> None:
    """Downloads models' weights to the directories of ``snapshot``; looks up all of them first."""
    from huggingface_hub.utils import is_notebook

    for name, files in {name: _weights_of(name) for name in names}.items():
        log.info("downloading %s to the Hub's cache, once", name)
        _download(name, snapshot(name).name, files, shown=sys.stderr.isatty() or is_notebook())


def _weights_of(name: str) -> list[str]:
    """Returns the names of a model's weights: safetensors, else pytorch_model.bin."""
    from huggingface_hub import HfApi

    directory = snapshot(name)
    with _explained(name):
        # The commit of config.json, even if the branch has moved since.
        listed = HfApi().list_repo_files(name.partition("@")[0], revision=directory.name)
    first = next((weights for weights in weight_files.WEIGHTS if weights in listed), None)
    if first is None:
        reason = weight_files.unread(directory, listed) or (
            "has neither safetensors nor a pytorch_model.bin: give the name of a T5 that "
            "transformers can load"
        )
        raise InputError(f"{name} {reason}")
    if first in weight_files.TORCH_WEIGHTS:
        weight_files.check_torch(f"{name}: {first}")
    if not first.endswith(weight_files.INDEX_ENDING):
        return [first]
    _download(name, directory.name, [first])
    files = weight_files.shard_names(directory / first)
    if lost := [file for file in files if file not in listed]:
        raise InputError(f"{name} has no {lost[0]}, which {first} lists: give a whole repository")
    return files


def command(name: str) -> str:
    """Returns the command that downloads a checkpoint to the Hub's cache."""
    repository, _, revision = name.partition("@")
    return f"hf download {repository}" + (f" --revision {revision}" if revision else "")


def _download(name: str, revision: str | None, files: Iterable[str], shown: bool = False) -> Path:
    """Downloads files of a repository, with bars if ``shown``; returns their cached directory."""
    # Imported here: most commands need none of it.
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.utils import tqdm

    class Silent(tqdm):
        """Progress bar that is never drawn."""

        def __init__(self, *args, **options):
            super().__init__(*args, **options | {"disable": True})

    with _explained(name):
        directory = snapshot_download(
            name.partition("@")[0],
            revision=revision,
            allow_patterns=sorted(files),
            # Release 1 of the library lists a commit's files on the Hub even when offline.
            local_files_only=constants.HF_HUB_OFFLINE,
            # The default draws bars even if stderr is a file.
            tqdm_class=None if shown else Silent,
        )
    return Path(directory)


@contextlib.contextmanager
def _explained(name: str) -> Iterator[None]:
    """Turns any error into an ``InputError`` with a remedy, and silences all warnings."""
    from huggingface_hub import constants, errors
    from huggingface_hub.utils import logging as hub_logging

    repository, _, revision = name.partition("@")
    verbosity = hub_logging.get_verbosity()
    hub_logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except InputError:
        raise
    # ``huggingface_hub``, its HTTP library and the disk raise unrelated types.
    except Exception as error:
        why = f"the Hub cannot be reached ({one_line(error.__cause__ or error)})"
        if constants.HF_HUB_OFFLINE:
            why = "HF_HUB_OFFLINE is set"
        absent = (
            f"{name} is no directory here and not complete in {constants.HF_HUB_CACHE}, and {why}: "
            f"run `{command(name)}` where there is a network, or give a directory"
        )
        texts = {
            errors.GatedRepoError: f"{name} is gated: accept its terms at "
            f"{constants.ENDPOINT}/{repository}, and log in (`hf auth login`, or HF_TOKEN)",
            errors.RepositoryNotFoundError: f"{name} is no directory here and no repository at "
            f"{constants.ENDPOINT} that you may read: check the name, or log in if it is private "
            "(`hf auth login`, or HF_TOKEN)",
            errors.RevisionNotFoundError: f"{repository} has no revision {revision or 'main'!r}: "
            "give a branch, a tag or a commit",
            errors.LocalEntryNotFoundError: absent,
            errors.OfflineModeIsEnabled: absent,
            errors.HFValidationError: f"{name} is no directory here and no name of the Hub "
            f"({one_line(error)}): give a directory or OWNER/NAME",
            Exception: f"cannot download {name} ({one_line(error)}): run `{command(name)}` where "
            "there is a network, or give a directory",
        }
        text = next(text for kind, text in texts.items() if isinstance(error, kind))
        raise InputError(text) from error
    finally:
        hub_logging.set_verbosity(verbosity)
