"""What only some runs need: a package for each, which `config.features` lists and which imports no other."""
