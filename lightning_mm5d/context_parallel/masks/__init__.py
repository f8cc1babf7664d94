"""Attention masks without a matrix of queries by keys: which tiles are empty, full or mixed."""
