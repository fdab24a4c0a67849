"""Networks (Flax linen) and the functional caches that decoding runs on."""
