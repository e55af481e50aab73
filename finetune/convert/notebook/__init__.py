"""Read a notebook, and take its secrets out."""
