"""Done once, at conversion: record a run, apply the rules of a transition, make a plan."""
