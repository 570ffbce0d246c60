"""Generated: one folder per transformers release."""
