"""Checkpoints by their names on the Hugging Face Hub: OWNER/NAME, or OWNER/NAME@REVISION.

``huggingface_hub`` does the work, and its environment variables hold: HF_HOME, HF_TOKEN,
HF_HUB_OFFLINE and the others. What lies in its cache is read from there; the Hub is asked once in
a process what a branch stands for, and without a network the cache's answer is taken.
"""

import contextlib
import functools
import logging
import re
import sys
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

from spec_t5x.checkpoints.huggingface.generation_config import GENERATION_NAME
from spec_t5x.checkpoints.huggingface.weight_files import (
    INDEX_ENDING,
    TORCH_WEIGHTS,
    WEIGHTS,
    check_torch,
    weight_files,
)
from spec_t5x.checkpoints.storage.files import CONFIG_NAME, one_line, read_json
from spec_t5x.data.mapped_vocabulary import MERGES_NAME, VOCAB_NAME
from spec_t5x.data.tokenizer_vocabulary import TOKENIZER_NAME
from spec_t5x.data.vocabulary import SPIECE_NAME
from spec_t5x.errors import InputError

# What is read of a checkpoint besides its weights.
_SMALL_FILES = (
    CONFIG_NAME,
    GENERATION_NAME,
    SPIECE_NAME,
    TOKENIZER_NAME,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    VOCAB_NAME,
    MERGES_NAME,
)
_NAME = re.compile(r"(?P<repository>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>[^@:,\s]+))?", re.ASCII)

log = logging.getLogger(__name__)


def is_name(text: str) -> bool:
    """Whether a text has the form of a name: OWNER/NAME or OWNER/NAME@REVISION."""
    return _NAME.fullmatch(text) is not None


@functools.cache
def snapshot(name: str) -> Path:
    """The directory of a checkpoint in the Hub's cache, without its weights; downloads them.

    A process asks once, and so reads one commit of it, whose hash is the directory's name.

    Raises:
        InputError: no such repository or revision, no right to read it, or neither a network nor a
            copy in the cache.
    """
    repository, revision = _split(name)
    with _explained(name):
        directory = _download(repository, revision, _SMALL_FILES)
    if not (directory / CONFIG_NAME).is_file():
        raise InputError(
            f"{name} has no {CONFIG_NAME} in {directory}: give the name of a T5 that transformers "
            f"can load, or run `{command(name)}` where there is a network"
        )
    return directory


def download_weights(name: str) -> None:
    """Completes ``snapshot``: safetensors, or ``pytorch_model.bin`` where there are none.

    Raises:
        InputError: as ``snapshot``, or the repository holds no such weights.
    """
    from huggingface_hub import HfApi

    directory = snapshot(name)
    with contextlib.suppress(InputError):
        # Asks nobody where nothing is missing.
        weight_files(directory)
        return
    # All of one commit.
    repository, commit = _split(name)[0], directory.name
    with _explained(name):
        listed = HfApi().list_repo_files(repository, revision=commit)
    first = next((weights for weights in WEIGHTS if weights in listed), None)
    if first is None:
        raise InputError(
            f"{name} has neither safetensors nor a pytorch_model.bin: give the name of a T5 that "
            "transformers can load"
        )
    if first in TORCH_WEIGHTS:
        check_torch(f"{name}: {first}")
    log.info("downloading %s to the Hub's cache, once", name)
    with _explained(name):
        if not first.endswith(INDEX_ENDING):
            _download(repository, commit, [first], shown=True)
            return
        _download(repository, commit, [first])
        shards = read_json(directory / first).get("weight_map", {}).values()
        _download(repository, commit, sorted(set(map(str, shards))), shown=True)


def command(name: str) -> str:
    """What downloads it to the Hub's cache."""
    repository, revision = _split(name)
    return f"hf download {repository}" + (f" --revision {revision}" if revision else "")


def _split(name: str) -> tuple[str, str | None]:
    parts = _NAME.fullmatch(name)
    return parts["repository"], parts["revision"]


def _download(
    repository: str, revision: str | None, files: Iterable[str], shown: bool = False
) -> Path:
    # Imported here: most commands need none of it.
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.utils import tqdm

    class Silent(tqdm):
        """No bar."""

        def __init__(self, *args, **options):
            super().__init__(*args, **options | {"disable": True})

    return Path(
        snapshot_download(
            repository,
            revision=revision,
            allow_patterns=list(files),
            # Release 1 asks the Hub for the files of a commit, offline or not.
            local_files_only=constants.HF_HUB_OFFLINE,
            # Theirs writes to files, too.
            tqdm_class=None if shown and sys.stderr.isatty() else Silent,
        )
    )


@contextlib.contextmanager
def _explained(name: str) -> Iterator[None]:
    """Around code that asks the Hub: its errors become an ``InputError``, its warnings nothing."""
    from huggingface_hub import constants, errors
    from huggingface_hub.utils import logging as hub_logging

    repository, revision = _split(name)
    verbosity = hub_logging.get_verbosity()
    hub_logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except InputError:
        raise
    except errors.GatedRepoError as error:
        raise InputError(
            f"{name} is gated: accept its terms at {constants.ENDPOINT}/{repository}, and log in "
            "(`hf auth login`, or HF_TOKEN)"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise InputError(
            f"{name} is no directory here and no repository at {constants.ENDPOINT} that you may "
            "read: check the name, or log in if it is private (`hf auth login`, or HF_TOKEN)"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise InputError(
            f"{repository} has no revision {revision or 'main'!r}: give a branch, a tag or a commit"
        ) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        why = f"the Hub cannot be reached ({one_line(error.__cause__ or error)})"
        if constants.HF_HUB_OFFLINE:
            why = "HF_HUB_OFFLINE is set"
        raise InputError(
            f"{name} is no directory here and not whole in {constants.HF_HUB_CACHE}, and {why}: "
            f"run `{command(name)}` where there is a network, or give a directory"
        ) from error
    except errors.HFValidationError as error:
        raise InputError(
            f"{name} is no directory here and no name of the Hub ({one_line(error)}): give a "
            "directory or OWNER/NAME"
        ) from error
    # What its HTTP library raises, and the disk.
    except Exception as error:
        raise InputError(
            f"cannot download {name} ({one_line(error)}): run `{command(name)}` where there is a "
            "network, or give a directory"
        ) from error
    finally:
        hub_logging.set_verbosity(verbosity)
