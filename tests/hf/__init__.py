"""Hugging Face's models and PEFT's adapters with zero_full; needs `pip install .[hf]`."""
