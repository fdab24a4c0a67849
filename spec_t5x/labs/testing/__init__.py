"""Parts for tests of a target, a draft or a loop; decoding uses none of them."""
