"""The rules: what a transition knows about each recorded operation."""
