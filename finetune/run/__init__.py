"""The one story of a run, behind both front doors: story.py, and what it calls from opening to the final model."""
