"""The checks of a record, a file for each family; `covey.audit.table` has them in their order."""
