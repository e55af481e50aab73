"""The model of a run: loaded, adapted, and checked for what its architecture cannot do."""
