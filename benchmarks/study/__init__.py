"""`python -m benchmarks.study`: repeats a published study of one GPU against two on this machine."""
