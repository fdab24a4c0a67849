"""Entry point of ``python -m spec_t5x.infer``, the same command as ``spec-t5x infer``."""

import sys

from spec_t5x.cli.main import main

if __name__ == "__main__":
    sys.argv.insert(1, "infer")
    sys.exit(main())
