"""Whether this package's training modes learn as well as TRL on pretrained models."""
