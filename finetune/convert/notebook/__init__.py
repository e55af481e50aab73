"""Read a notebook, and write its code in the way that the converter reads, with the same meaning."""
