"""What is in host memory between its uses: ``Modality.memory.offload``."""
