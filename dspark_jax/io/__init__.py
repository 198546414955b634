"""Files: Hugging Face checkpoints, tokenizers and chat templates."""
