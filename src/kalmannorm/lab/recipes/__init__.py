"""Definition of a run: setting, method, recipe, presets."""
