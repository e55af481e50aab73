"""A run from its opening to its final model, in the parts that commands share."""
