"""The data engine: formats -> messages -> ids and labels -> packs -> plan; a ledger of what happened to each row."""
