"""From a conversation to token ids and labels: rendering the chat template and finding what is supervised."""
