"""Commands of ``spec-t5x`` that train and measure, which ``cli.main`` finds by their addresses."""
