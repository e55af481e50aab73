"""Measure a job on one device and predict it on several."""
