"""A model behind HTTP: `covey serve`."""
