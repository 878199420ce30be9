"""The machine: devices, memory, and where a figure was measured."""
