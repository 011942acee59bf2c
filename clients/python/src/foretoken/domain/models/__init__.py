"""Model architectures: presets by name, or any Hugging Face `config.json`."""
