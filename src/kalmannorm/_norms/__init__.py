"""The norm layers, and what they share."""
