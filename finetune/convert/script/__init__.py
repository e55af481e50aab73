"""Decide on each statement, rewrite it for any number of ranks, and write the script and the report."""
