"""Memory-bandwidth bound: the time to read once what a decoder step must read.

At batch 1 a step uses each weight once, so reading the weights takes longer than computing. No
plain decoding is faster than reading every weight, and the part of the caches in use, at the
machine's read bandwidth (section 3.4 of the paper counts the same accesses). Speculative decoding
takes fewer steps than tokens, and may be faster than the bound.
"""

import math
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp
import numpy as np

from spec_t5x.models.binding import expected_shapes
from spec_t5x.models.t5 import T5Config

_OF_SOURCE = re.compile("^encoder/|encoder_decoder_attention/(key|value)/")
_SECONDS, _REPEATS = 0.05, 5


def bytes_read(config: T5Config, lengths: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Returns bytes that plain decoding at batch 1 reads: encoding all inputs, all decoder steps.

    Args:
      config: the network's configuration.
      lengths: number of tokens of each source and its output, end of sequence included.
    """
    numbers = {path: math.prod(shape) for path, shape in expected_shapes(config).items()}
    table = numbers.pop("token_embedder/embedding")
    # The decoder's projections of the source are read once for each input, too.
    of_source = sum(n for path, n in numbers.items() if _OF_SOURCE.search(path))
    # A step reads one row of the embedding, or all if it is the output layer.
    of_token = table if config.logits_via_embedding else config.emb_dim
    of_step = sum(numbers.values()) - of_source + of_token
    # Keys and values of all heads of all layers, at one position.
    cached = 2 * config.num_decoder_layers * config.num_heads * config.head_dim
    encoder = sum(of_source + min(source * config.emb_dim, table) for source, _ in lengths)
    decoder = sum(
        of_step + cached * (position + source)
        for source, tokens in lengths
        for position in range(1, tokens + 1)
    )
    size = jnp.dtype(config.dtype).itemsize
    return size * encoder, size * decoder


def read_bandwidth(num_bytes: int, threads: int) -> float:
    """Returns the bytes per second of reading ``num_bytes`` repeatedly, split among threads.

    Give the bytes of a step: a small model stays in the last-level cache, which is several
    times faster than memory.
    """
    # Ones, because all pages of zeros may share one physical page.
    parts = [np.ones(num_bytes // 4 // threads, np.float32) for _ in range(threads)]

    def seconds(passes: int) -> float:
        start = time.perf_counter()
        list(pool.map(lambda part: [part.max() for _ in range(passes)], parts))
        return time.perf_counter() - start

    with ThreadPoolExecutor(threads) as pool:
        # Enough passes that a timing exceeds the scheduler's time slice.
        passes = max(1, round(_SECONDS / min(seconds(1) for _ in range(2))))
        fastest = min(seconds(passes) for _ in range(_REPEATS))
    return passes * sum(part.nbytes for part in parts) / fastest
