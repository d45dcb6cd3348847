"""Memory that two ranks can see: layout, providers, doorbells. Nothing is imported here: a name costs what it uses."""
