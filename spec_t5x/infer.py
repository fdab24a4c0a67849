"""``python -m spec_t5x.infer``: what ``spec-t5x infer`` does, under T5X's kind of name."""

import sys

from spec_t5x.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["infer", *sys.argv[1:]]))
