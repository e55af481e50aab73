"""The data engine: formats -> messages -> ids and labels -> packs -> plan; a ledger of what happened to each row."""

from finetune.data.collate import collate
from finetune.data.prepare import Data, prepare
from finetune.data.store import Rows

__all__ = ["Data", "Rows", "collate", "prepare"]
