"""What only some runs need: a package or module for each, which `config.features` lists and which imports no other."""
