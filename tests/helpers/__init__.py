"""What tests share: tiny models, runs in this process and launched ranks."""

from pathlib import Path

ROOT = Path(__file__).parents[2]  # of the repository
