"""Each rank reads a file of its own name, as two machines with different copies would: RANK in --data.train_file."""

from __future__ import annotations

import os
import sys

from finetune import train

if __name__ == "__main__":
    place = sys.argv.index("--data.train_file") + 1
    sys.argv[place] = sys.argv[place].replace("RANK", os.environ["RANK"])
    sys.exit(train.main())
