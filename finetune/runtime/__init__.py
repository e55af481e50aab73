"""The base layer of a run: ranks, devices, files, processes and signals."""
