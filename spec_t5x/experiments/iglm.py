"""Antibody sequences: IgLM sped up by IgLM-S, from the user's own installation.

    pip install --no-deps iglm
    python -m spec_t5x.experiments.iglm --chain heavy --species human

IgLM (Shuai et al. 2023) has 12.9M parameters, IgLM-S 1.4M, both GPT-2's layout and 33
tokens: 20 amino acids, and tags for chain and species, which begin a sequence. The weights
lie in the PyPI package ``iglm``, under an academic, non-commercial licence: they are read
where they lie, by the reader of GPT-2 checkpoints, and nothing of them is in this package.
The package itself is not imported.

Sequences are sampled from the model as it is, without the list of banned tags of
``iglm``'s own sampler.
"""

import argparse
import dataclasses
import importlib.util
import json
import sys
from pathlib import Path

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers

from spec_t5x.checkpoints.huggingface.gpt2 import open_gpt2
from spec_t5x.checkpoints.loading import check_same_vocabulary
from spec_t5x.checkpoints.storage.stored_model import LoadedModel
from spec_t5x.data.mapped_vocabulary import MappedVocabulary
from spec_t5x.drafts.transformer import TransformerDraft
from spec_t5x.errors import InputError
from spec_t5x.experiments.comparison import Comparison, compare
from spec_t5x.generation import GenerateOptions, Generator
from spec_t5x.machine.dtypes import resolve_dtype
from spec_t5x.models.binding import bind

TARGET, DRAFT = "IgLM", "IgLM-S"
CHAINS = {"heavy": "[HEAVY]", "light": "[LIGHT]"}
SPECIES = ("camel", "human", "mouse", "rabbit", "rat", "rhesus")
# Ends a sequence, in IgLM's training.
_END = "[CLS]"
# Longer than any variable domain: iglm's own sampler stops there.
MAX_LENGTH = 150


@dataclasses.dataclass(frozen=True, kw_only=True)
class IglmOptions:
    """What to generate, and how."""

    chain: str = "heavy"
    species: str = "human"
    # Amino acids that every sequence begins with, one letter each.
    prompt: str = ""
    num_sequences: int = 32
    gamma: int = 4
    temperature: float = 1.0
    batch_size: int = 1
    repeats: int = 3
    seed: int = 0

    def __post_init__(self):
        for name, known in (("chain", CHAINS), ("species", SPECIES)):
            if getattr(self, name) not in known:
                raise InputError(
                    f"{name} is {getattr(self, name)!r}: choose one of {', '.join(known)}"
                )
        for name in ("num_sequences", "gamma", "batch_size", "repeats"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}: give at least 1")

    def text(self) -> str:
        """The prompt: the chain is the token that starts, so species and letters."""
        return f"[{self.species.upper()}]{self.prompt}"


def find_models(package: str | Path | None = None) -> Path:
    """The folder of ``iglm``'s trained models.

    Args:
        package: the folder of the package; by default the installed one.

    Raises:
        InputError: the package is not installed, or holds no such folder.
    """
    if package is None:
        spec = importlib.util.find_spec("iglm")
        if spec is None or spec.origin is None:
            raise InputError(
                "the package iglm is not installed: pip install --no-deps iglm, or give --package"
            )
        package = Path(spec.origin).parent
    folder = Path(package) / "trained_models"
    for name in (TARGET, DRAFT, "vocab.txt"):
        if not (folder / name).exists():
            raise InputError(f"no {folder / name}: give the folder of the package iglm")
    return folder


def load_iglm(folder: Path, name: str, chain: str, dtype: str = "float32") -> LoadedModel:
    """One of the two models, for sequences of one chain.

    Args:
        folder: of ``find_models``.
        name: ``TARGET`` or ``DRAFT``.
        chain: a name of ``CHAINS``; its tag is the token that starts a sequence.
        dtype: what the network computes in.

    Raises:
        InputError: files that are absent, damaged, or not as IgLM's.
    """
    pieces = (folder / "vocab.txt").read_text(encoding="utf-8").split()
    ids = {piece: number for number, piece in enumerate(pieces)}
    missing = [tag for tag in (CHAINS[chain], _END, "[UNK]") if tag not in ids]
    if missing:
        raise InputError(f"{folder / 'vocab.txt'} has no {missing[0]}: install iglm again")
    special = {"start_id": ids[CHAINS[chain]], "eos_id": ids[_END]}
    vocabulary = MappedVocabulary(_tokenizer(ids), num_ids=len(ids), **special)
    return open_gpt2(folder / name, vocabulary=vocabulary, **special).load(dtype=dtype)


def make_generator(folder: Path, options: IglmOptions) -> Generator:
    """IgLM with IgLM-S as its draft."""
    dtype = resolve_dtype("auto")
    target, draft = (load_iglm(folder, name, options.chain, dtype) for name in (TARGET, DRAFT))
    check_same_vocabulary(target, draft)
    return Generator(
        target=bind(target.params, target.config),
        vocabulary=target.vocabulary,
        max_source_len=MAX_LENGTH,
        draft=TransformerDraft(bind(draft.params, draft.config)),
    )


def run(folder: Path, options: IglmOptions) -> Comparison:
    """Samples the sequences with IgLM alone and with IgLM-S drafting.

    Raises:
        InputError: letters that are no amino acids, or what ``load_iglm`` refuses.
    """
    generator = make_generator(folder, options)
    vocabulary = generator.vocabulary
    pieces = {vocabulary.piece(token) for token in range(vocabulary.vocab_size)}
    unknown = [letter for letter in options.prompt if letter not in pieces]
    if unknown:
        raise InputError(f"the prompt has {unknown[0]!r}: give the letters of amino acids")
    decoding = GenerateOptions(
        gamma=options.gamma,
        temperature=options.temperature,
        batch_size=options.batch_size,
        max_decode_len=MAX_LENGTH,
        seed=options.seed,
    )
    return compare(generator, [options.text()] * options.num_sequences, decoding, options.repeats)


def _tokenizer(ids: dict[str, int]) -> tokenizers.Tokenizer:
    """A tag or a letter is a token."""
    tokenizer = tokenizers.Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\[[A-Z]+\]|."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def main(arguments=None) -> int:
    """Prints the sequences, then a JSON object with the figures."""
    parser = argparse.ArgumentParser(
        prog="python -m spec_t5x.experiments.iglm",
        description="IgLM sped up by IgLM-S (academic, non-commercial licence).",
    )
    parser.add_argument("--package", help="the folder of the package iglm (the installed one)")
    for field in dataclasses.fields(IglmOptions):
        parser.add_argument(f"--{field.name}", type=field.type, default=field.default)
    values = vars(parser.parse_args(arguments))
    package = values.pop("package")
    try:
        comparison = run(find_models(package), IglmOptions(**values))
    except InputError as error:
        print(f"iglm: error: {error}", file=sys.stderr)
        return 2
    for (output,) in comparison.outputs:
        print(output.output)
    figures = comparison.to_dict()
    names = ("alpha", "block_efficiency", "speed_up", "c", "target_calls")
    print(json.dumps({name: figures[name] for name in names}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
