"""The data pipeline: files -> messages -> token ids and labels -> packs -> plan. A ledger counts the rows."""

IGNORE_INDEX = -100  # label of a token without loss: the default `ignore_index` of PyTorch's cross entropy
