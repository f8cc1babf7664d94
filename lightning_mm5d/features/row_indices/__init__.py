"""Fields of a batch that hold positions of samples, which would be wrong once the batch is split."""
