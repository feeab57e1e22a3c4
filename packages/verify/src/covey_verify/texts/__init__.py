"""How a completion is written: its format, structure, language and length; and what a judge says of it."""
