"""Words that options take for a choice, in flags, gin and Python. Imports nothing."""

# Gamma: as many drafts as pay (``loops/pace.py``). Weights: the format of the checkpoint.
AUTO = "auto"
# A draft's name for plain decoding.
NO_DRAFT = "none"
# Kinds of verifiers; those of drafts are in the ``registry``.
VERIFIERS = ("token", "block", "coupled", "rejection", "multi", "tree")
# Weights: matrices in 8 bits with a scale for each column, or in 4 for 64 rows of it.
INT8 = "int8"
INT4 = "int4"
WEIGHTS = (AUTO, INT8, INT4)
# Types that weights are written to disk as.
STORED_DTYPES = ("bfloat16", "float32")

# This package's options, and the names that transformers, vLLM, CTranslate2 and T5X have for them.
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
input input_file inputs in_file
output_dir output out_dir output_path
"""
_OURS = {
    theirs: ours
    for ours, *names in map(str.split, _ELSEWHERE.strip().splitlines())
    for theirs in names
}
# Options that they have and this package does not.
_ABSENT = {
    **dict.fromkeys(["num_beam_groups", "diversity_penalty"], "there is no diverse beam search"),
    **dict.fromkeys(
        ["output_scores", "output_logits", "logprobs"],
        "an output has a score, its tokens have none",
    ),
    **dict.fromkeys(["typical_p", "min_p"], "sampling takes temperature, top_k or top_p"),
    "return_dict_in_generate": "an output is an object with its score and counts",
    "streamer": "Generator.stream yields a text while it is decoded",
    "stream": "a terminal gets the text while it is decoded; in Python Generator.stream",
    "prompt_lookup_num_tokens": 'the draft "copy" looks up the source, and gamma is the number',
    "eos_token_id": "the checkpoint's own ends a text",
    "pad_token_id": "the vocabulary's own pads a text",
    "use_cache": "keys and values are always cached",
    "skip_special_tokens": "a text holds none; output_ids do",
    "generation_config": "options are GenerateOptions(…), or single ones by name",
}


def ours(name: str, options) -> str:
    """Returns a hint for a message about a name that other programs have; empty for any other.

    >>> ours("num_beams", ["beams", "seed"])
    ": it is 'beams' here"
    """
    name = name.replace("-", "_")
    if _OURS.get(name) in options:
        return f": it is {_OURS[name]!r} here"
    return f": {_ABSENT[name]}" if name in _ABSENT else ""
