"""The processes of a run: collectives, rendezvous, failures, signals and stuck ranks."""
