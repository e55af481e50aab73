"""The data pipeline: files -> messages -> token ids and labels -> packs -> plan. A ledger counts the rows."""

# How the rows of a step are chosen, in each checkpoint's manifest: a checkpoint of another order cannot be resumed.
ORDER = "random"
IGNORE_INDEX = -100  # label of a token without loss: the default `ignore_index` of PyTorch's cross entropy
