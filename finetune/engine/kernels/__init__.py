"""Attention, LoRA and FP8 products, and which kernels compute them."""
