"""This package and its peers on the same rows, the same model and the same machine."""
