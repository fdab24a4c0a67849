"""The vocabulary of a Hugging Face directory: the tokenizer that transformers 5 makes of its files.

``tokenizer.json`` overrides ``spiece.model``. Either file is read without transformers if it alone
defines the tokenizer: it has all tokens that other files add, with their flags, and the class uses
it unchanged or is ``T5Tokenizer``, which uses its pieces and normalisation only, and finds no other
steps that change ids (``spiece.model`` needs this class, or mT5's). A file that ``T5Tokenizer``
cannot read, because it is not Unigram, is used unchanged. In all other cases, transformers makes
the tokenizer. Without these files, ``checkpoint-500`` has those that Trainers save above it.
"""

import contextlib
import dataclasses
import functools
import json
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers.processors import TemplateProcessing

from spec_t5x.checkpoints.storage.files import describing, read_if_there
from spec_t5x.checkpoints.storage.vocabularies import vocabulary_folders
from spec_t5x.data.mapped_vocabulary import SUFFICIENT, MappedVocabulary, frame_of, tokenizer_of
from spec_t5x.data.tokenizer_vocabulary import TOKENIZER_NAME, type_of_model
from spec_t5x.data.unigram import UnigramVocabulary, is_t5s, pieces_of
from spec_t5x.data.vocabulary import (
    MODEL_NAME,
    MOST_EXTRA_IDS,
    SPIECE_NAME,
    ByteVocabulary,
    SentencePieceVocabulary,
    Vocabulary,
    is_sentinel,
    read_spiece,
)
from spec_t5x.errors import InputError, as_input_error, check_numbers
from spec_t5x.machine.extras import needed
from spec_t5x.types import EOS_ID, PAD_ID, UNK_ID

SETTINGS_NAME = "tokenizer_config.json"
_CLEANS_UP = "clean_up_tokenization_spaces"
ADDED_NAME, _SPECIAL_NAME = "added_tokens.json", "special_tokens_map.json"
_T5, _MT5, _BYT5 = "T5Tokenizer", "MT5Tokenizer", "ByT5Tokenizer"
# Classes for which transformers uses a tokenizer.json unchanged (it has none of MT5), without
# "Fast"; we write the first one's.
UNCHANGED = ("PreTrainedTokenizer", "TokenizersBackend", _MT5)
_OF_T5 = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
# Steps of ``T5Tokenizer``, and the types of a file's steps (``_steps``) that they replace.
_SPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
_WORDS = {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, _SPACE]}
_STEPS = {"Precompiled", "WhitespaceSplit", "Metaspace", "Strip", "Replace"}
# The normalizer that ``GemmaTokenizer`` makes, and Gemma's own files have.
_OF_GEMMA = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
# Tokens, as files have them, by their ids.
_Tokens = dict[int, dict[str, Any]]

# Logs a warning once, as target, draft and vocabulary may be read from one directory.
_warn = functools.cache(logging.getLogger(__name__).warning)


def read_vocabulary(
    directory: Path, values: dict[str, Any], start_id: int | None, eos_ids: Sequence[int]
) -> Vocabulary | None:
    """Reads the vocabulary of a checkpoint with config.json ``values``; None if no file has one.

    ``start_id`` and ``eos_ids`` are the tokenizer's ids that start and end a text. If the start and
    the first EOS are T5's, ``start_id`` is None; otherwise all ids are renumbered.
    """
    directory = tokenizer_folder(directory)
    settings = read_if_there(directory / SETTINGS_NAME)
    if settings.get("split_special_tokens"):
        _warn(
            f"{directory / SETTINGS_NAME} sets split_special_tokens, which is not applied: names "
            "of special tokens in a source are single tokens"
        )
    # transformers uses the file of a umT5 unchanged, whichever class it names.
    kind = _MT5 if values["model_type"] == "umt5" else class_of(settings, values, _T5)
    # mT5's spiece.model holds its sentinels already, T5's does not.
    default = 0 if values["model_type"] == "mt5" else 100
    default = 125 if kind == _BYT5 else default
    extra_ids = default if settings.get("extra_ids") is None else settings["extra_ids"]
    check_numbers(0, MOST_EXTRA_IDS, extra_ids=extra_ids)
    files = _Files(directory, settings, kind, extra_ids)
    if kind == _BYT5 and start_id is not None:
        raise InputError(
            f"{directory} is a ByT5 whose texts start with {start_id} and end with "
            f"{list(eos_ids)}: give one with T5's ids, 0 and 1"
        )
    if kind == _BYT5:
        vocabulary = files.byte_vocabulary()
    elif start_id is None:
        vocabulary = files.t5_vocabulary(values.get("vocab_size"), eos_ids)
    else:
        tokenizer, num_ids = files.tokenizer(is_needed=True), values.get("vocab_size")
        vocabulary = tokenizer and _mapped(directory, num_ids, start_id, eos_ids, tokenizer)
    if vocabulary is not None and not isinstance(vocabulary, MappedVocabulary):
        vocabulary.eos_ids = tuple(eos_ids)
    # transformers ignores the setting for BPE.
    if vocabulary is not None and getattr(vocabulary, "model_type", None) != "BPE":
        vocabulary.cleans_up = bool(settings.get(_CLEANS_UP))
    return vocabulary


def class_of(settings: dict[str, Any], values: dict[str, Any], default: str) -> str:
    """Returns the tokenizer's class, without "Fast", by its settings or config.json's values."""
    kind = settings.get("tokenizer_class") or values.get("tokenizer_class") or default
    return str(kind).removesuffix("Fast")


def _mapped(
    directory: Path,
    num_ids: int | None,
    start_id: int,
    eos_ids: Sequence[int],
    values: dict[str, Any],
) -> MappedVocabulary:
    """Makes a renumbered vocabulary of a tokenizer.json's ``values``.

    All ids are the tokenizer's, whose number replaces None for ``num_ids``.
    """
    tokenizer = tokenizer_of(values, directory)
    num_ids, (eos_id, *more) = num_ids or tokenizer.get_vocab_size(), eos_ids
    ids = {"num_ids": num_ids, "start_id": start_id, "eos_id": eos_id, "more_eos_ids": more}
    remedy = "copy its files again, or add an unknown token to its model"
    with as_input_error(f"cannot use the tokenizer in {directory}", remedy, Exception):
        vocabulary = MappedVocabulary(tokenizer, **ids)
    if not any(vocabulary.source_frame):
        _warn(
            f"the tokenizer in {directory} adds no special tokens to a source, as in transformers: "
            "set its post_processor if the model was trained with an EOS there"
        )
    return vocabulary


def settings_of(vocabulary: Vocabulary, pad_id: int) -> dict[str, Any]:
    """Returns the values of tokenizer_config.json; ``pad_id`` is the tokenizer's id of padding."""
    settings = {_CLEANS_UP: vocabulary.cleans_up, "tokenizer_class": f"{UNCHANGED[0]}Fast"}
    if isinstance(vocabulary, MappedVocabulary):
        # A token that has a role becomes special, so only special tokens are given one.
        special, ids = vocabulary.special, {"eos_token": vocabulary.eos_id, "pad_token": pad_id}
        return settings | {role: special[i] for role, i in ids.items() if i in special}
    if isinstance(vocabulary, UnigramVocabulary) and vocabulary.has_added:
        return settings | _OF_T5
    kind = _BYT5 if isinstance(vocabulary, ByteVocabulary) else _T5
    return settings | _OF_T5 | {"tokenizer_class": kind, "extra_ids": vocabulary.extra_ids}


@dataclasses.dataclass(frozen=True)
class _Files:
    """Tokenizer files of a directory, of which transformers makes one tokenizer."""

    directory: Path
    # The content of tokenizer_config.json, and the class, without "Fast".
    settings: dict[str, Any]
    kind: str
    # Number of sentinels after a SentencePiece model or bytes.
    extra_ids: int

    def t5_vocabulary(self, num_rows: int | None, eos_ids: Sequence[int]) -> Vocabulary | None:
        """Reads a vocabulary with T5's special ids; without files, ByT5's if it fits, or None.

        One that is not T5's Unigram model, or frames a source otherwise, is renumbered.
        """
        path, spiece = self.directory / TOKENIZER_NAME, self.directory / SPIECE_NAME
        tokenizer = self.tokenizer()
        if tokenizer is None and spiece.is_file():
            if not read_spiece(spiece).is_t5s:
                _warn(
                    f"transformers 5 reads {spiece} without its bytes, merges or spaces after "
                    f"words, so some texts get other ids: for these, save {TOKENIZER_NAME} with it"
                )
            return SentencePieceVocabulary(spiece, self.extra_ids, reads_sentinels=True)
        if tokenizer is None:
            of_bytes = ByteVocabulary(reads_sentinels=True)
            return of_bytes if self.kind == _T5 and num_rows == of_bytes.vocab_size else None
        made = _without_model(tokenizer, self.directory)
        with describing(self.directory, "tokens"):
            is_own = is_t5s(tokenizer) and frame_of(made, list) == ((), (EOS_ID,))
            pieces, foreign = pieces_of(tokenizer) if is_own else ([], [])
        if not is_own:
            return _mapped(self.directory, num_rows, PAD_ID, eos_ids, tokenizer)
        # ``spiece.model`` has T5's steps (more spaces are one), and its sentinels are added tokens.
        steps = json.loads(made.to_str())
        usual = ("Precompiled", None), ("Strip", None), ("Replace", {"Regex": " {2,}"})
        found = [(each["type"], each.get("pattern")) for each in _steps(steps["normalizer"])]
        is_plain = not foreign and steps["pre_tokenizer"] == _WORDS and all(map(usual.count, found))
        added = [each for each in tokenizer["added_tokens"] if is_sentinel(each["content"])]
        is_plain &= not any(each.get("single_word") or each["normalized"] for each in added)
        is_plain &= len(added) >= self.extra_ids
        if is_plain and spiece.is_file() and read_spiece(spiece).is_t5s:
            vocabulary = SentencePieceVocabulary(spiece, self.extra_ids, reads_sentinels=True)
            if [vocabulary.piece(token) for token in range(vocabulary.vocab_size)] == pieces:
                return vocabulary
        is_own = tokenizer == read_if_there(path)
        return UnigramVocabulary(path, None if is_own else json.dumps(tokenizer).encode())

    def byte_vocabulary(self) -> ByteVocabulary:
        """Returns ByT5's vocabulary; added tokens, if there are any, must be its sentinels."""
        with describing(self.directory, "added tokens"):
            given, special = self._named()
        first = ByteVocabulary(0).vocab_size
        added = [(number, given[number]["content"]) for number in sorted(given) if number >= first]
        sentinels = [(first + i, f"<extra_id_{i}>") for i in range(len(added))]
        others = [name for number, name in added if (number, name) not in sentinels]
        others += sorted(n for n in special - {*_OF_T5.values()} if not is_sentinel(n))
        if others:
            raise InputError(
                f"{self.directory} adds token {others[0]!r} to ByT5's: give a model without it"
            )
        return ByteVocabulary(len(sentinels) or self.extra_ids, reads_sentinels=True)

    def tokenizer(self, is_needed: bool = False) -> dict[str, Any] | None:
        """Returns the values of a tokenizer.json that defines transformers' tokenizer, or None.

        None means that there are no files, or a ``spiece.model`` suffices and not ``is_needed``.
        """
        own = read_if_there(self.directory / TOKENIZER_NAME)
        listed = {*(self.settings.get("fast_tokenizer_files") or ())} - {TOKENIZER_NAME}
        # Files that transformers prefers: that of its release, or those read where it is absent.
        others = [*listed, SPIECE_NAME] if listed else []
        if listed or not own:
            others.append(MODEL_NAME)
        is_theirs = any((self.directory / each).is_file() for each in others)
        if not (is_theirs or has_tokenizer(self.directory)):
            return None
        with describing(self.directory, "added tokens"):
            given, special = self._named()
            is_t5 = self.kind == _T5
            is_other = is_t5 and bool(own) and type_of_model(own) != "Unigram"
            if not is_theirs and own and (is_other or self._is_whole(own, given, special)):
                found = _of_t5(own) if is_t5 and not is_other else own
            elif not (is_theirs or own) and self._is_plain(given, special) and not is_needed:
                return None
            else:
                found = self._by_transformers(given)
            self._check_distinct(found)
        return found

    def _named(self) -> tuple[_Tokens, set[str]]:
        """Returns the tokens of other files, by id, and special names, "" for an end not T5's."""
        listed, sources = self.settings.get("added_tokens_decoder"), [self.settings]
        if listed is None:
            others = read_if_there(self.directory / ADDED_NAME)
            given = {number: {"content": name} for name, number in others.items()}
            sources.append(read_if_there(self.directory / _SPECIAL_NAME))
        else:
            given = {int(number): {**token} for number, token in listed.items()}
        special = {name for source in sources for name in _special(source)}
        ends = {end for each in sources for end in _special({"eos_token": each.get("eos_token")})}
        # ``T5Tokenizer`` ends a source with the EOS that the settings name.
        is_other = self.kind == _T5 and not ends <= {_OF_T5["eos_token"]}
        return given, special | ({""} if is_other else set())

    def _is_whole(self, own: dict[str, Any], given: _Tokens, special: set[str]) -> bool:
        """Tells whether the tokenizer.json ``own`` alone defines transformers' tokenizer."""
        is_kept, tokens = self.kind in UNCHANGED, {each["id"]: each for each in own["added_tokens"]}
        if self.kind == "GemmaTokenizer":
            is_kept = own["model"].get("byte_fallback") and own.get("normalizer") == _OF_GEMMA
        if self.kind == _T5:
            # Of the file's tokens, only those that the settings list are added, if they list any.
            is_part = "added_tokens_decoder" in self.settings and len(given) < len(tokens)
            is_kept = _has_steps_of_t5(own) and not (is_part and pieces_of(own)[1])
            pieces = {name for name, _ in own["model"]["vocab"]}
            special = special | {*_OF_T5.values(), *filter(is_sentinel, pieces)}
            special |= self._added_sentinels()
        # Flags in the settings override those in the file.
        is_same = all(each.items() <= tokens.get(i, {}).items() for i, each in given.items())
        known = {each["content"] for each in tokens.values() if each["special"]}
        return bool(is_kept) and is_same and special <= known

    def _is_plain(self, given: _Tokens, special: set[str]) -> bool:
        """Tells whether there is a T5's SentencePiece model, to which no file adds a token."""
        spiece = self.directory / SPIECE_NAME
        if self.kind not in (_T5, _MT5) or not spiece.is_file():
            return False
        pieces, symbols, _ = read_spiece(spiece)
        sentinels = [f"<extra_id_{i}>" for i in reversed(range(self.extra_ids))]
        pieces += sentinels
        added = {number: token["content"] for number, token in given.items()}
        names = special | symbols | {*added.values()}
        others = names - {*filter(is_sentinel, pieces)}
        if self.kind == _T5:
            # Sentinels that are not added are pieces like any.
            others |= {*sentinels} - names - self._added_sentinels()
        return others <= {*_OF_T5.values()} and added.items() <= dict(enumerate(pieces)).items()

    def _added_sentinels(self) -> set[str]:
        """Returns the sentinels that ``T5Tokenizer`` adds, unless a list or null replaces them."""
        extra, other = self.settings.get("extra_special_tokens", {}), "additional_special_tokens"
        is_listed = not isinstance(extra, dict) or (not extra and other in self.settings)
        return {f"<extra_id_{i}>" for i in range(0 if is_listed else self.extra_ids)}

    def _by_transformers(self, given: _Tokens) -> dict[str, Any]:
        """Returns transformers' tokenizer.json; raises ``InputError`` if it changes given ids."""
        with needed("transformers"):
            from transformers import AutoTokenizer, __version__
        if int(__version__.split(".")[0]) < 5:
            raise InputError(
                f"the tokenizer of {self.directory} needs transformers 5, and "
                f"{__version__} is installed: pip install 'transformers>=5'"
            )
        remedy = f"save it there as {TOKENIZER_NAME} with transformers 5"
        remedy = "copy its files again" if (self.directory / TOKENIZER_NAME).is_file() else remedy
        what = f"transformers cannot read the tokenizer of {self.directory}"
        with as_input_error(what, remedy, Exception), _unprinted():
            # Without the setting it asks standard input whether to run code of the files.
            made = AutoTokenizer.from_pretrained(self.directory, trust_remote_code=False)
            tokenizer = made.backend_tokenizer
        for number, name in ((i, token["content"]) for i, token in given.items()):
            if name and (other := tokenizer.token_to_id(name)) != number:
                raise InputError(
                    f"{self.directory} gives token {name!r} id {number}, but transformers would "
                    f"give it {other}: save its tokenizer again with the release that made it"
                )
        return json.loads(tokenizer.to_str())

    def _check_distinct(self, values: dict[str, Any]) -> None:
        """Raises ``InputError`` if normalisation makes added tokens equal: either might match."""
        normalizer = _without_model(values, self.directory).normalizer
        tokens, found = values["added_tokens"] if normalizer else (), {}
        for name in [token["content"] for token in tokens if token["normalized"]]:
            first = found.setdefault(normalizer.normalize_str(name), name)
            if first != name:
                raise InputError(
                    f"{self.directory} adds tokens {first!r} and {name!r}, which its normalisation "
                    "makes equal, so that transformers matches either at random: add them as not "
                    "normalized"
                )


def _special(settings: dict[str, Any]) -> Iterator[str]:
    """Yields the names of special tokens in a settings file: by role, and additional ones."""
    for entry, value in settings.items():
        if entry.endswith("_special_tokens") and isinstance(value, list | dict):
            value = value.values() if isinstance(value, dict) else value
            yield from (each["content"] if isinstance(each, dict) else each for each in value)
        elif entry.endswith("_token") and isinstance(value, str | dict):
            yield value["content"] if isinstance(value, dict) else value


def tokenizer_folder(directory: Path) -> Path:
    """Returns the first of ``vocabulary_folders`` with tokenizer files, or the directory itself."""
    places = vocabulary_folders(directory)
    has_any = (each for each in places if has_tokenizer(each) or (each / SETTINGS_NAME).is_file())
    return next(has_any, directory)


def has_tokenizer(directory: Path) -> bool:
    """Tells whether a directory has the files of a tokenizer."""
    return any(all((directory / name).is_file() for name in names) for names in SUFFICIENT)


@contextlib.contextmanager
def _unprinted() -> Iterator[None]:
    """Discards what the tokenizers library prints, of entries of old files, to standard output."""
    kept = os.dup(1)
    try:
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), 1)
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _of_t5(values: dict[str, Any]) -> dict[str, Any]:
    """Returns what ``T5Tokenizer`` makes of a tokenizer.json: its pieces with T5's steps."""
    maps = (step for step in _steps(values.get("normalizer")) if step["type"] == "Precompiled")
    steps = {"normalizer": next(maps, None), "pre_tokenizer": _WORDS, "decoder": _SPACE}
    end, tokens = _OF_T5["eos_token"], {each["content"]: each for each in values["added_tokens"]}
    frame = {"single": f"$A {end}", "pair": f"$A {end} $B {end}"}
    frame = TemplateProcessing(**frame, special_tokens=[(end, tokens[end]["id"])])
    steps["post_processor"] = json.loads(frame.__getstate__())
    model = values["model"] | {"unk_id": UNK_ID, "byte_fallback": False}
    return values | steps | {"model": model}


def _without_model(values: dict[str, Any], directory: Path) -> tokenizers.Tokenizer:
    """Returns a tokenizer.json's steps with one unknown piece: its own take seconds to load."""
    model = {"type": "WordLevel", "vocab": {"<unk>": UNK_ID}, "unk_token": "<unk>"}
    return tokenizer_of(values | {"added_tokens": [], "model": model}, directory)


def _has_steps_of_t5(values: dict[str, Any]) -> bool:
    steps = [*_steps(values.get("normalizer")), *_steps(values.get("pre_tokenizer"))]
    return {step["type"] for step in steps} <= _STEPS


def _steps(step: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """Yields all steps of a normalizer or pre-tokenizer, nested ones included."""
    parts = step and (step.get("normalizers") or step.get("pretokenizers"))
    for part in parts or ():
        yield from _steps(part)
    if step and not parts:
        yield step
