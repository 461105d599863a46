"""Peak memory of a configuration before a run: traced on tensors without data, or measured in small steps."""
