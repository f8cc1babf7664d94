"""How the layers of a model come to work on local tokens."""
