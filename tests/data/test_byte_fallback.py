"""Gemma's and Llama's kinds of tokenizer.json: what is in no piece becomes bytes."""

import json

import pytest
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from spec_t5x.data.mapped_vocabulary import MappedVocabulary, frame_of, their_ids
from spec_t5x.errors import InputError
from spec_t5x.generation.stop_strings import settled

CORPUS = ["the quick brown fox jumps over the lazy dogs", "seven wizards box the quick dogs"]
TURNS = ["<start_of_turn>", "<end_of_turn>"]
TEXTS = [
    "the quick fox",
    "häuser 🦊 the dogs",
    "  two  spaces",
    "<start_of_turn>user\nthe fox<end_of_turn>\n",
    "a <0xE4> b",
]


def gemma() -> tuple[Tokenizer, dict[str, int]]:
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 2)]
    )
    special = ["<pad>", "<eos>", "<bos>", "<unk>"]
    return trained(tokenizer, special), {"start_id": 2, "eos_id": 1}


def llama() -> tuple[Tokenizer, dict[str, int]]:
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    return trained(tokenizer, ["<unk>", "<s>", "</s>"]), {"start_id": 1, "eos_id": 2}


def trained(tokenizer, special) -> Tokenizer:
    of_bytes = [f"<0x{byte:02X}>" for byte in range(256)]
    named = [*special, *TURNS, *of_bytes]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=named, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    values = json.loads(tokenizer.to_str())
    # The names of bytes in a text are text.
    added = [token for token in values["added_tokens"] if token["content"] not in of_bytes]
    return Tokenizer.from_str(json.dumps(values | {"added_tokens": added}))


@pytest.fixture(params=[gemma, llama], ids=["gemma", "llama"])
def both(request):
    """Provides the tokenizer, and its vocabulary."""
    tokenizer, ids = request.param()
    return tokenizer, MappedVocabulary(tokenizer, num_ids=tokenizer.get_vocab_size(), **ids)


@pytest.mark.parametrize("text", TEXTS)
def test_ids_and_text_are_the_librarys(both, text):
    tokenizer, vocabulary = both
    theirs = tokenizer.encode(text, add_special_tokens=False).ids
    ours = vocabulary.encode(text)
    assert vocabulary.to_theirs(ours) == theirs
    assert vocabulary.decode(ours) == tokenizer.decode(theirs, skip_special_tokens=True)
    if "turn" not in text:
        assert vocabulary.decode(ours) == text


def test_a_character_of_several_bytes_is_shown_when_it_is_whole(both):
    _, vocabulary = both
    text = "the 🦊 box"
    ids = vocabulary.encode(text)
    shown = [settled(vocabulary.decode(ids[:count]), []) for count in range(len(ids) + 1)]
    assert all(text.startswith(each) for each in shown)
    # Its four bytes are four tokens.
    assert len(ids) > 6 and sum("🦊" not in each for each in shown) >= 5


def test_ids_that_the_model_has_not(both):
    _, vocabulary = both
    with pytest.raises(InputError, match="the eos token's id 5 is not below 5: lower it"):
        their_ids(5, start_id=0, eos_id=5)
    num = vocabulary.num_ids
    with pytest.raises(InputError, match=f"the tokenizer gives id {num} and the model has {num}"):
        vocabulary.from_theirs([num])


def test_the_frame_of_a_source(both):
    tokenizer, vocabulary = both
    framed = vocabulary.to_theirs(vocabulary.framed(vocabulary.encode("the fox")))
    assert framed == tokenizer.encode("the fox").ids
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <bos> $A", special_tokens=[("<bos>", 2)]
    )
    with pytest.raises(InputError, match="the post_processor makes .* of 'a': give it one"):
        frame_of(tokenizer, list)
