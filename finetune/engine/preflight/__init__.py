"""What is checked before any heavy import: model files, the Hub, adapters, remote code and packages."""
