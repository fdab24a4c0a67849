"""Training and measurements. ``spec_t5x`` decodes without them."""
