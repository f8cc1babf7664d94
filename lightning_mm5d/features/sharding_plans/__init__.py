"""How layers of known families of models are sharded over tensor parallel ranks."""
