"""A notebook's own trainer against the converted script, both run confined."""
