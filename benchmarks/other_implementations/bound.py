"""The memory-bandwidth bound: the time of one pass over what a decoder step must read.

A step uses each weight once for each row. At batch 1 that is less work than fetching the
weights, so no implementation takes less time a step than reading every weight once, and the part
of the caches in use, at the machine's read bandwidth (section 3.4 of the paper counts the same
accesses). Speculation takes fewer steps, and so may go below it.
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
    """Bytes that plain decoding at batch 1 must read: of the encoder, and of all decoder steps.

    Args:
      config: the network.
      lengths: tokens of each source and of its output, end of sequence included.
    """
    numbers = {path: math.prod(shape) for path, shape in expected_shapes(config).items()}
    table = numbers.pop("token_embedder/embedding")
    # The decoder's projections of the source are read once for each input, too.
    of_source = sum(n for path, n in numbers.items() if _OF_SOURCE.search(path))
    # Of the table a token's row alone, unless it is the output layer.
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
    """Bytes per second of reading ``num_bytes`` again and again, each thread its own part.

    As many bytes as a step reads: a small model stays in the last-level cache, which is several
    times faster than memory.
    """
    # Ones: pages of zeros would be one page.
    parts = [np.ones(num_bytes // 4 // threads, np.float32) for _ in range(threads)]

    def seconds(passes: int) -> float:
        start = time.perf_counter()
        list(pool.map(lambda part: [part.max() for _ in range(passes)], parts))
        return time.perf_counter() - start

    with ThreadPoolExecutor(threads) as pool:
        # The first pass is the warm-up; a timing shorter than a scheduler's slice says little.
        passes = max(1, round(_SECONDS / min(seconds(1) for _ in range(2))))
        fastest = min(seconds(passes) for _ in range(_REPEATS))
    return passes * sum(part.nbytes for part in parts) / fastest
