"""Parts of tests of a target, a draft or a loop; no part of decoding."""
