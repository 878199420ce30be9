"""The lab: trains, compares and analyses norms if only few examples share their statistics.

It needs an extra: pip install 'kalmannorm[lab]'. Start with `kalmannorm --help`. The guide is docs/lab.md.
"""
