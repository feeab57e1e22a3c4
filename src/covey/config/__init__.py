"""The configuration: one page of YAML, strict, checked before anything heavy is loaded."""
