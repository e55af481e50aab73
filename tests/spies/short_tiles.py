"""The shipped command with tiles of eight tokens: a test's rows are shorter than the shortest real one."""

from __future__ import annotations

import sys

from finetune import train
from finetune.engine.training import tiled_mlp

if __name__ == "__main__":
    tiled_mlp.tile_length = lambda tokens, hidden, intermediate: 8
    sys.exit(train.main())
