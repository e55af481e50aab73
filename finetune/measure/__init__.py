"""Measuring a job on one device, and predicting it on several."""
