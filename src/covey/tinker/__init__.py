"""A local server for the `tinker` SDK, which trains and samples adapters of one base model."""
