"""Change a notebook's code before it is classified: into what the converter reads, and without what a script lacks."""
