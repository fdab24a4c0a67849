"""What tests of a target, a draft or a loop are made of; no part of decoding."""
