"""How many drafts a step carries: rules and a measurement, none of which can change a token."""
