"""A model sharded over all ranks with FSDP2: loading, memory per rank and whole weights."""
