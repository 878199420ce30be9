"""The norm layers and their base classes."""
