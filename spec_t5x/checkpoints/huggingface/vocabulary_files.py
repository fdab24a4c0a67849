"""The vocabulary of a Hugging Face directory: the tokenizer that transformers 5 makes of its files.

``tokenizer.json`` comes before ``spiece.model``. transformers' ``T5Tokenizer`` takes pieces and
normalisation of either and does the rest in its own way; other classes take a ``tokenizer.json`` as
it is. Tokens are added by ``tokenizer_config.json``, or by what older releases wrote in its place.
"""

import dataclasses
import functools
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from spec_t5x.checkpoints.storage.files import describing, read_if_there, read_json
from spec_t5x.data.mapped_vocabulary import MappedVocabulary, read_tokenizer
from spec_t5x.data.tokenizer_vocabulary import TOKENIZER_NAME
from spec_t5x.data.unigram import UnigramVocabulary, pieces_of
from spec_t5x.data.vocabulary import (
    SPIECE_NAME,
    ByteVocabulary,
    SentencePieceVocabulary,
    Vocabulary,
    read_spiece,
)
from spec_t5x.errors import InputError
from spec_t5x.types import EOS_ID, UNK_ID

SETTINGS_NAME = "tokenizer_config.json"
_CLEANS_UP = "clean_up_tokenization_spaces"
_ADDED_NAME, _SPECIAL_NAME = "added_tokens.json", "special_tokens_map.json"
_T5, _BYT5 = "T5Tokenizer", "ByT5Tokenizer"
# The class that takes a tokenizer.json as it is.
_AS_IT_IS = "PreTrainedTokenizerFast"
# Tokens with a role, in transformers' order, and those that ``T5Tokenizer`` has in any case.
_ROLES = [f"{role}_token" for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]
_OF_T5 = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
_UNIGRAM = "Unigram"
_USUAL = {"Precompiled", "Strip", "Replace", "WhitespaceSplit", "Metaspace"}
_FLAGS = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
_SPACES = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}


def read_vocabulary(
    directory: Path, values: dict[str, Any], start_id: int | None, eos_ids: Sequence[int]
) -> Vocabulary | None:
    """The vocabulary of a checkpoint; None without files.

    Args:
        directory, values: the checkpoint and its config.json.
        start_id: what starts a text where ids are to be renumbered, None where they are T5's.
        eos_ids: what ends a text there, T5's first where ids are T5's.
    """
    settings = read_if_there(directory / SETTINGS_NAME)
    kind = settings.get("tokenizer_class") or values.get("tokenizer_class") or _T5
    files = _Files(directory, settings, str(kind), values["model_type"])
    if files.tokenizer_class.startswith(_BYT5):
        if start_id is not None:
            raise InputError(
                f"{directory} is a ByT5 whose texts start with {start_id} and end with "
                f"{list(eos_ids)}: give one with T5's ids, 0 and 1"
            )
        vocabulary = _bytes(settings, directory)
    else:
        vocabulary = _of_text(files, values, start_id, eos_ids)
    if vocabulary is not None and start_id is None:
        vocabulary.eos_ids = tuple(eos_ids)
    if vocabulary is not None and not _is_bpe(vocabulary):
        vocabulary.cleans_up = bool(settings.get(_CLEANS_UP))
    return vocabulary


def _is_bpe(vocabulary: Vocabulary) -> bool:
    """Says whether transformers leaves its texts as they are, whatever ``_CLEANS_UP`` is."""
    return isinstance(vocabulary, MappedVocabulary) and vocabulary.model_type == "BPE"


def _of_text(
    files: "_Files", values: dict[str, Any], start_id: int | None, eos_ids: Sequence[int]
) -> Vocabulary | None:
    """``read_vocabulary`` of other than ByT5."""
    directory = files.directory
    with describing(f"tokenizer of {directory}", "added tokens"):
        tokenizer = files.tokenizer()
        _check_distinct(tokenizer, directory)
    if start_id is not None:
        mapped = mapped_vocabulary(directory, values["vocab_size"], start_id, eos_ids, tokenizer)
        if mapped and not mapped.has_frame:
            raise InputError(
                f"the tokenizer in {directory} puts nothing around a source, where T5s have what "
                "ends it: set its post_processor"
            )
        return mapped
    if tokenizer is not None:
        return files.t5_vocabulary(tokenizer)
    of_bytes = ByteVocabulary(reads_sentinels=True)
    return of_bytes if values.get("vocab_size") == of_bytes.vocab_size else None


def mapped_vocabulary(
    directory: Path,
    num_ids: int,
    start_id: int,
    eos_ids: Sequence[int],
    values: dict[str, Any] | None = None,
) -> Vocabulary | None:
    """A renumbered vocabulary; None without files.

    ``values`` are of a tokenizer.json that is to be taken in place of the directory's.
    """
    if values is None:
        tokenizer = read_tokenizer(directory)
    else:
        tokenizer = tokenizers.Tokenizer.from_str(json.dumps(values))
    if tokenizer is None:
        return None
    return MappedVocabulary(
        tokenizer, num_ids=num_ids, start_id=start_id, eos_id=eos_ids[0], more_eos_ids=eos_ids[1:]
    )


def settings_of(vocabulary: Vocabulary, pad_id: int) -> dict[str, Any]:
    """tokenizer_config.json for transformers; ``pad_id`` is theirs."""
    return _class_of(vocabulary, pad_id) | {_CLEANS_UP: vocabulary.cleans_up}


def _class_of(vocabulary: Vocabulary, pad_id: int) -> dict[str, Any]:
    if isinstance(vocabulary, MappedVocabulary):
        # A token that is not special would become so by being named.
        special, ids = vocabulary.special, {"eos_token": vocabulary.eos_id, "pad_token": pad_id}
        roles = {role: special[token] for role, token in ids.items() if token in special}
        return {"tokenizer_class": _AS_IT_IS} | roles
    if isinstance(vocabulary, UnigramVocabulary) and vocabulary.has_added:
        return {"tokenizer_class": _AS_IT_IS} | _OF_T5
    kind = _BYT5 if isinstance(vocabulary, ByteVocabulary) else _T5
    return {"tokenizer_class": kind, "extra_ids": vocabulary.extra_ids} | _OF_T5


@dataclasses.dataclass(frozen=True)
class _Files:
    """The files of a directory that transformers makes a tokenizer of."""

    directory: Path
    # Its tokenizer_config.json, and what is named there or in config.json.
    settings: dict[str, Any]
    tokenizer_class: str
    model_type: str

    @property
    def is_t5(self) -> bool:
        """Says whether transformers reads it as ``T5Tokenizer`` and not as it is."""
        return self.model_type != "umt5" and self.tokenizer_class.removesuffix("Fast") == _T5

    @functools.cached_property
    def named(self) -> list[dict[str, Any]]:
        """The tokens that have a role; one is what ends a source."""
        settings = self.settings
        if "added_tokens_decoder" not in settings:
            settings = settings | read_if_there(self.directory / _SPECIAL_NAME)
        as_it_is = not self.is_t5 and (self.directory / TOKENIZER_NAME).is_file()
        return list(_with_roles(settings if as_it_is else _OF_T5 | settings))

    @property
    def extra_ids(self) -> int:
        """Sentinels that are appended to a SentencePiece model."""
        # mT5's file holds its sentinels already, T5's does not.
        default = 0 if self.model_type == "mt5" else 100
        found = self.settings.get("extra_ids")
        return default if found is None else found

    def tokenizer(self) -> dict[str, Any] | None:
        """The tokenizer.json that holds what transformers makes of the files; None without any."""
        own, spiece = read_if_there(self.directory / TOKENIZER_NAME), self.directory / SPIECE_NAME
        if own and own["model"].get("type", _UNIGRAM) != _UNIGRAM:
            return own
        if own:
            pieces, charsmap = own["model"]["vocab"], _charsmap(own.get("normalizer"))
            added = own["added_tokens"]
        elif spiece.is_file():
            pieces, charsmap, added = read_spiece(spiece)
            pieces += [(f"<extra_id_{i}>", 0.0) for i in reversed(range(self.extra_ids))]
        else:
            return None
        tokens = self._with_ids([name for name, _ in pieces], added)
        if own and not self.is_t5:
            return own | {"added_tokens": tokens}
        (eos,) = (token["content"] for token in self.named if token["role"] == "eos_token")
        (eos_id,) = (token["id"] for token in tokens if token["content"] == eos)
        return _as_t5(pieces, charsmap, tokens, eos_id)

    def t5_vocabulary(self, tokenizer: dict[str, Any]) -> Vocabulary:
        """The vocabulary that ``tokenizer`` describes, with T5's special ids."""
        path, spiece = self.directory / TOKENIZER_NAME, self.directory / SPIECE_NAME
        if not self.is_t5 and path.is_file():
            self._check_frame(tokenizer)
        pieces, foreign = pieces_of(tokenizer)
        made = json.dumps(tokenizer, ensure_ascii=False).encode()
        if foreign and not path.is_file() and not self.is_t5:
            raise InputError(
                f"{self.directory} adds token {foreign[0]!r} and has no {TOKENIZER_NAME}: save its "
                "tokenizer there with transformers 5"
            )
        if foreign:
            return UnigramVocabulary(path, made)
        if spiece.is_file():
            vocabulary = SentencePieceVocabulary(spiece, self.extra_ids)
            same = [vocabulary.piece(token) for token in range(vocabulary.vocab_size)] == pieces
            if same or not path.is_file():
                return vocabulary
        # What releases have written beside pieces and normalisation gives the same ids.
        own = read_json(path)
        steps = {*_types(own.get("normalizer")), *_types(own.get("pre_tokenizer"))}
        return UnigramVocabulary(path, made if self.is_t5 and steps - _USUAL else None)

    def _check_frame(self, tokenizer: dict[str, Any]) -> None:
        """Refuses a tokenizer that puts something else than T5's around a source."""
        made = tokenizers.Tokenizer.from_str(json.dumps(tokenizer))
        found = made.encode("a").ids[len(made.encode("a", add_special_tokens=False).ids) :]
        if found != [EOS_ID]:
            raise InputError(
                f"{self.directory / TOKENIZER_NAME} ends a source with ids {found}, T5's with "
                f"[{EOS_ID}]: set its post_processor, or tokenizer_class to {_T5}"
            )

    def _with_ids(self, names: list[str], added: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The added tokens with the ids that transformers gives them; ``added`` are a file's own.

        Raises:
            InputError: a file gives a token another id.
        """
        ids, found = {name: i for i, name in enumerate(names)}, {}
        new = itertools.count(len(names))
        for given, token in self._listed(added, ids):
            content = token["content"]
            if not content or content in found:
                continue
            number = ids[content] if content in ids else next(new)
            if given is not None and given != number:
                raise InputError(
                    f"{self.directory} gives token {content!r} id {given}, and transformers would "
                    f"give it {number}: save its tokenizer again with the release that made it"
                )
            found[content] = _FLAGS | token | {"id": number}
        return sorted(found.values(), key=lambda token: token["id"])

    def _listed(
        self, added: list[dict[str, Any]], ids: Mapping[str, int]
    ) -> Iterator[tuple[int | None, dict[str, Any]]]:
        """Added tokens in the order of transformers, with the ids that files give them."""
        settings, has_decoder = self.settings, "added_tokens_decoder" in self.settings
        extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens")
        extra = list(extra.values() if isinstance(extra, dict) else extra or [])
        roles = {token["content"] for token in self.named}
        if has_decoder:
            decoder = settings["added_tokens_decoder"] or {}
            listed = {int(number): _token(token) for number, token in decoder.items()}
        else:
            others = read_if_there(self.directory / _ADDED_NAME)
            special = roles | set(map(_content, extra))
            listed = {
                number: _token({"content": name, "special": name in special})
                for name, number in others.items()
            }
        of_pieces = not (self.directory / TOKENIZER_NAME).is_file()
        if not (has_decoder or extra or of_pieces):
            older = read_if_there(self.directory / _SPECIAL_NAME)
            extra = older.get("additional_special_tokens") or []
        if not self.is_t5 or of_pieces or not has_decoder:
            listed |= {token["id"]: _token(token) for token in added}
        for number, token in sorted(listed.items()):
            yield number, token | {"special": token["special"] or token["content"] in roles}
        yield from ((None, _token(token)) for token in self.named)
        yield from ((None, _token(token, special=True)) for token in extra)
        if self.is_t5:
            sentinels = (f"<extra_id_{i}>" for i in range(self.extra_ids))
            yield from ((None, _token(name)) for name in sentinels if name in ids)


def _check_distinct(values: dict[str, Any] | None, directory: Path) -> None:
    """Refuses added tokens that are one after normalisation: the library takes either by chance."""
    tokens = values["added_tokens"] if values and values.get("normalizer") else []
    names = [token["content"] for token in tokens if token["normalized"]]
    if len(names) < 2:
        return
    # The pieces do not matter.
    model = {"type": _UNIGRAM, "unk_id": 0, "vocab": [("<unk>", 0.0)]}
    bare = tokenizers.Tokenizer.from_str(json.dumps(values | {"added_tokens": [], "model": model}))
    found = {}
    for name in names:
        other = found.setdefault(bare.normalizer.normalize_str(name), name)
        if other != name:
            raise InputError(
                f"{directory} adds tokens {other!r} and {name!r}, which are one after its "
                "normalisation, so that transformers takes either by chance: add them as not "
                "normalized"
            )


def _content(token: Any) -> str:
    return token["content"] if isinstance(token, dict) else token


def _token(token: Any, special: bool = False) -> dict[str, Any]:
    """An added token as tokenizer.json has it but for its id; a mere name is a special one's."""
    if isinstance(token, str):
        token = {"content": token, "special": True}
    flags = {name: token[name] for name in _FLAGS if name in token}
    flags["special"] = special or flags.get("special", False)
    return {"content": token["content"], "normalized": not flags["special"]} | flags


def _with_roles(settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The tokens that have a role: transformers' own, and others by the names of their entries."""
    others = sorted(name for name in settings if name.endswith("_token") and name not in _ROLES)
    for role in (*_ROLES, *others):
        value = settings.get(role)
        if isinstance(value, str) or (role in _ROLES and isinstance(value, dict)):
            yield _token(value, special=True) | {"role": role}


def _types(step: dict[str, Any] | None) -> Iterator[str]:
    """The kinds of the steps of a normalizer or pre-tokenizer."""
    parts = step and (step.get("normalizers") or step.get("pretokenizers"))
    if parts:
        yield from itertools.chain.from_iterable(map(_types, parts))
    elif step:
        yield step["type"]


def _charsmap(normalizer: dict[str, Any] | None) -> str | None:
    """SentencePiece's normalisation as a tokenizer.json has it, in base 64."""
    parts = [normalizer] if normalizer else []
    if parts and normalizer["type"] == "Sequence":
        parts = normalizer["normalizers"]
    found = (part["precompiled_charsmap"] for part in parts if part["type"] == "Precompiled")
    return next(found, None)


def _as_t5(
    pieces: Sequence[Sequence[Any]], charsmap: str | None, tokens: list[dict[str, Any]], eos_id: int
) -> dict[str, Any]:
    """The tokenizer.json of transformers' ``T5Tokenizer``."""
    source, end = {"Sequence": {"id": "A", "type_id": 0}}, _OF_T5["eos_token"]
    single = [source, {"SpecialToken": {"id": end, "type_id": 0}}]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": tokens,
        "normalizer": charsmap and {"type": "Precompiled", "precompiled_charsmap": charsmap},
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "WhitespaceSplit"}, _SPACES],
        },
        "post_processor": {
            "type": "TemplateProcessing",
            "single": single,
            "pair": single,
            "special_tokens": {end: {"id": end, "ids": [eos_id], "tokens": [end]}},
        },
        "decoder": _SPACES,
        "model": {"type": _UNIGRAM, "unk_id": UNK_ID, "vocab": pieces, "byte_fallback": False},
    }


def _bytes(settings: dict[str, Any], directory: Path) -> ByteVocabulary:
    """ByT5's vocabulary, whose sentinels transformers lists among the added tokens."""
    with describing(f"tokenizer of {directory}", "added tokens"):
        listed = settings.get("added_tokens_decoder") or {}
        added = {int(number): token["content"] for number, token in listed.items()}
        others = read_if_there(directory / _ADDED_NAME)
        added |= {int(number): name for name, number in others.items()}
    first = ByteVocabulary(0).vocab_size
    sentinels = sorted(number for number in added if number >= first)
    for place, number in enumerate(sentinels):
        if (number, added[number]) != (first + place, f"<extra_id_{place}>"):
            raise InputError(
                f"{directory} adds token {added[number]!r} with id {number} to ByT5's: give a "
                "model without added tokens"
            )
    found = settings.get("extra_ids")
    default = 125 if found is None else found
    return ByteVocabulary(len(sentinels) or default, reads_sentinels=True)
