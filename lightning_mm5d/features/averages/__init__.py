"""Averages of weights that callbacks compute, cut as the module is."""
