"""Epochs that go on in another layout than they began in."""
