"""Weights in and out: Hugging Face's Llama folders and GGUF files."""
