"""The machine: GPUs, NCCL settings, attention kernels, CPU threads and disks."""
