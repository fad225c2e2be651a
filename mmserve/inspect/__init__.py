"""What a model sees of a prompt: every token by kind, every image cut into its tiles, and one sheet that shows both."""
