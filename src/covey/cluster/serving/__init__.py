"""Serving a model over HTTP: `covey serve`."""
