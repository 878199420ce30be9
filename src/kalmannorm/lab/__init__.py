"""The lab: train, compare and look at normalizers when few examples share their statistics.

Needs the extra: pip install 'kalmannorm[lab]'. `kalmannorm --help` is the way in; docs/lab.md is the guide.
"""
