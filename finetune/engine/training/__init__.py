"""The trainer and what it is made of: arguments, schedule, batches, loss, evaluation, checkpoints."""
