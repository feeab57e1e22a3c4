"""A local server of Tinker's protocol: the `tinker` SDK trains and samples adapters of one model here."""
