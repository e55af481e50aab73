"""`python -m finetune.doctor`: a report on this machine for a bug report."""
