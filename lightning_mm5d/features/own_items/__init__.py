"""Each rank loads the items of lazy tensors that it reads, and begins with those of the next batch."""
