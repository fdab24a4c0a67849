"""Values that options share in flags, gin and Python; other programs' names of our options."""

# Gamma: the fastest number of drafts (``loops/pace.py``). Weights: those of the checkpoint.
AUTO = "auto"
# Name in place of a draft's that selects plain decoding.
NO_DRAFT = "none"
# Weights: 8-bit matrices with a scale per column, or 4-bit with a scale per 64 rows of one.
INT8 = "int8"
INT4 = "int4"
WEIGHTS = (AUTO, INT8, INT4)
# Keys and values of the source: those of the network's type, or in int8.
KV = (AUTO, INT8)
# Types in which weights are stored on disk; "int8" only in this package's format.
STORED_DTYPES = ("bfloat16", "float32")
NATIVE_DTYPES = (*STORED_DTYPES, INT8)
# Types that networks compute in; "auto" is the device's fast one.
DTYPES = (AUTO, *STORED_DTYPES)
# Largest seed: JAX draws with the low 32 bits alone.
MOST_SEED = 2**32 - 1

# A line has an option of this package, then its names in transformers, vLLM, CTranslate2, T5X.
_ELSEWHERE = """
max_decode_len max_new_tokens max_length max_tokens max_output_tokens max_decoding_length
max_decode_len max_decode_length max_gen_len max_target_length max_output_length
min_decode_len min_new_tokens min_length min_tokens
beams num_beams beam_size beam_width beam num_beam
beam_alpha decoding_alpha brevity_penalty
num_decodes num_return_sequences num_hypotheses num_samples n best_of return_all_decodes
temperature do_sample sampling_temperature sampling
top_k topk sampling_topk k
top_p topp sampling_topp nucleus p
gamma num_assistant_tokens num_speculative_tokens num_draft_tokens draft_length
gamma speculation_length lookahead num_candidate_tokens
draft assistant_model assistant draft_model speculative_model model_draft draft_checkpoint
target model model_name model_name_or_path checkpoint pretrained
stop stop_strings stop_sequences stop_sequence stop_words stop_token until
seed random_seed rng_seed manual_seed
output_prefix target_prefix decoder_prefix forced_prefix decoder_text
truncate truncation truncate_inputs
max_source_len max_input_length max_input_len max_source_length max_prompt_length max_input_tokens
batch_size max_batch_size eval_batch_size per_device_batch_size max_num_seqs
dtype torch_dtype precision
vocabulary tokenizer spm_model sentencepiece_model
input input_file inputs in_file data
data input
output_dir output out_dir output_path
"""
_OURS = {
    theirs: ours
    for ours, *names in map(str.split, _ELSEWHERE.strip().splitlines())
    for theirs in names
}
# Options of those programs that this package lacks, with the reason or the substitute.
_ABSENT = {
    **dict.fromkeys(["num_beam_groups", "diversity_penalty"], "there is no diverse beam search"),
    **dict.fromkeys(
        ["output_scores", "output_logits", "logprobs"],
        "an output has one score, its tokens have none",
    ),
    **dict.fromkeys(["typical_p", "min_p"], "use temperature, top_k or top_p"),
    "return_dict_in_generate": "an output is an object with its score and counts",
    "streamer": "Generator.stream yields a text while it is decoded",
    "stream": "a terminal shows the text while it is decoded; in Python use Generator.stream",
    "prompt_lookup_num_tokens": 'use the draft "copy" with gamma tokens of the source',
    "eos_token_id": "the checkpoint's id is used",
    "pad_token_id": "the vocabulary's id is used",
    "use_cache": "keys and values are always cached",
    "skip_special_tokens": "outputs have none; output_ids have them",
    "generation_config": "give GenerateOptions(…), or options by name",
}


def hint_for(name: str, options) -> str:
    """Returns a hint for an option that another program has, "" for others; ``options`` are ours.

    >>> hint_for("num_beams", ["beams", "seed"])
    ": it is 'beams' here"
    """
    name = name.replace("-", "_")
    if _OURS.get(name) in options:
        return f": it is {_OURS[name]!r} here"
    return f": {_ABSENT[name]}" if name in _ABSENT else ""
