"""What a run is: setting, method, recipe, presets."""
