"""The most frequent tokens of texts, which a narrow head keeps."""

import numpy as np
import pytest

from spec_t5x.errors import InputError
from spec_t5x.labs.training.likeliest_tokens import likeliest_ids


def test_the_likeliest_tokens_of_texts():
    tokens = np.array([5, 5, 5, 9, 9, 7, 7, 2, 0, 0, 0, 0, 0])
    # End of sequence first, padding last; of 7 and 9, and of all the others, the lower ids.
    order = [1, 5, 7, 9, 2, 3, 4, 6, 8, 10, 11]
    for number in range(1, 12):
        assert likeliest_ids(tokens, number, 12).tolist() == sorted(order[:number])
    for number in (0, 12):
        with pytest.raises(InputError, match=f"a narrow head of {number} of 12 tokens"):
            likeliest_ids(tokens, number, 12)
