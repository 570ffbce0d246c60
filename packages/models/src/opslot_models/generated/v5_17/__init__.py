"""Generated from transformers 5.17.0."""
