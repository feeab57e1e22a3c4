"""Writers of records: a hook for each framework, and the recorder on which they are built."""
