"""Tests of `finetune review`."""
