"""Array aliases and the special token ids that T5 vocabularies share.

The aliases are jaxtyping annotations; the tests check every annotated call. Axis names:

    batch    rows decoded together (``num_inputs * num_decodes`` inside a loop)
    source   encoder length, padding included
    length   decoder length
    new      tokens fed to one cached call (1 in plain decoding, gamma + 1 in verification)
    gamma    tokens proposed in one iteration
    vocab    size of the (padded) vocabulary
"""

import jax
import numpy as np
from jaxtyping import Bool, Float, Float32, Int, Integer, Key, PyTree, Shaped, UInt32  # noqa: F401

# An array on the device or on the host: fetched results keep their dataclasses.
Array = jax.Array | np.ndarray

# T5's vocabularies of every size reserve the first three ids. The padding id is also the
# decoder's start token.
PAD_ID = 0
EOS_ID = 1
UNK_ID = 2
# Id of the token that ends a row, or a tuple of several ids; they may be traced.
EndOfSequence = Int[Array, ""] | int | tuple[Int[Array, ""] | int, ...]
