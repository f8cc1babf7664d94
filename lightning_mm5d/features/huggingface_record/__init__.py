"""What a checkpoint says about the Hugging Face models in it."""
