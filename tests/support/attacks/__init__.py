"""Random and hostile cases, one module per area: a few run in the suite, many by `python benchmarks/attack.py`.

Each module has `run(count, seed, folder)`, which returns counts, and `MUST_BE_ZERO`, which names the counts that tell
of a fault.
"""
