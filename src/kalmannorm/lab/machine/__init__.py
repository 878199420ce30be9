"""The machine: devices, memory, and the origin of a measurement."""
