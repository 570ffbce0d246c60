"""Commands. A training process imports none of this."""
