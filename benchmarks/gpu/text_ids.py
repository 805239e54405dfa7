"""Token ids of real text as a .npy, for `run.py --text`: `python benchmarks/gpu/text_ids.py OUT.npy [options]`.

Runs on any machine: the one with the GPU may have neither text nor tokenizer. Sources and defaults: `ids.text_stream`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parents[1]))

import ids
import numpy as np
from world import EOS, VOCAB_SIZE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json")
    parser.add_argument("--text", type=Path, help="a folder of text files")
    parser.add_argument("--tokens", type=int, default=1 << 20)
    options = parser.parse_args()
    stream = ids.text_stream(VOCAB_SIZE, options.tokens, EOS, options.tokenizer, options.text)
    np.save(options.out, stream.ids[: options.tokens].astype(np.int32))
    print(stream.what)


if __name__ == "__main__":
    main()
