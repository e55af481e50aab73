"""What every part of a run stands on: ranks, devices, files, processes, signals."""
