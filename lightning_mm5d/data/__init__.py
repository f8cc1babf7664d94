"""What a rank loads, and how a batch becomes microbatches."""
