"""Generated from transformers 5.24.0."""
